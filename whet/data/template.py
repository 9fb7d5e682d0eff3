"""The chat template by delta: token ids only ever grow, and what was sampled is never tokenised again.

A first prompt is rendered whole. A reply of the environment is rendered as the text that the template puts between the end of an
assistant's turn and the start of the next one. Supervised rows go through the same pieces, so that training, rollout and evaluation see
the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from whet.data.parsers import Parsed, Parser, parse_hermes
from whet.types import JSON, Message, Task

MARK = "\u2063whet\u2063"
"""Stands for an assistant's text while a delta is cut out; invisible separators keep it from occurring in real text."""

Tools = Sequence[Mapping[str, JSON]]


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder.

    Raises:
        ValueError: if there is none.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(f"model.path: {folder} has no tokenizer (tokenizer.json, tokenizer_config.json); copy the model's own there")
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code))


class Renderer:
    """Messages to token ids and back, for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        parser: how the model writes tool calls.
        template_options: extra variables for the chat template, such as `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        parser: Parser = parse_hermes,
        template_options: Mapping[str, JSON] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._parser = parser
        self._options = dict(template_options or {})
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token; set it in tokenizer_config.json to the token that ends a turn")
        self.stop_token_ids: tuple[int, ...] = (cast(int, tokenizer.eos_token_id),)
        self._encode = lru_cache(maxsize=4096)(self._encode_text)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a piece of text, without anything added."""
        return self._encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def prompt(self, task: Task, tools: Tools = ()) -> tuple[int, ...]:
        """The ids of a task's first prompt, up to where the model begins."""
        if isinstance(task.prompt, str):
            return self.encode(task.prompt)
        return self.encode(self._render(task.prompt, (*tools, *task.tools), generate=True))

    def reply(self, messages: Sequence[Message], last: Sequence[int]) -> tuple[int, ...]:
        """The ids between a sampled turn and the next one: what closes the turn, the messages, and the next turn's opening.

        Args:
            messages: what the environment says, at least one message.
            last: the sampled turn; what of its closing it already holds is not added again.
        """
        opening = (Message("user", "u"), Message("assistant", MARK))
        text = self._render((*opening, *messages), (), generate=True)
        tail = text[text.rindex(MARK) + len(MARK) :]
        stop = self.tokenizer.decode(list(self.stop_token_ids[:1]))
        if last and last[-1] in self.stop_token_ids and tail.startswith(stop):
            tail = tail[len(stop) :]
        return self.encode(tail)

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """A sampled turn as a message; the stop token at its end is no part of the text."""
        if tokens and tokens[-1] in self.stop_token_ids:
            tokens = tokens[:-1]
        return self._parser(self.decode(tokens))

    def supervised(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """A whole conversation as ids, and which of them an assistant wrote (its stop token included, its opening not).

        Raises:
            ValueError: if the template rewrites earlier turns, so that the conversation is no chain of prefixes.
        """
        tokens: list[int] = []
        mask: list[bool] = []
        done = ""
        stop = self.tokenizer.decode(list(self.stop_token_ids[:1]))
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._render(messages[:i], tools, generate=True)
            after = self._render(messages[: i + 1], tools, generate=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise ValueError(f"the chat template rewrites what comes before message {i}; it cannot be used turn by turn")
            said = after[len(before) :]
            said = said[: said.rindex(stop) + len(stop)] if stop in said else said
            for text, trained in ((before[len(done) :], False), (said, True)):
                ids = self.encode(text)
                tokens.extend(ids)
                mask.extend([trained] * len(ids))
            done = before + said
        return tuple(tokens), tuple(mask)

    def _render(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str:
        options: dict[str, Any] = {"tools": [dict(t) for t in tools]} if tools else {}
        try:
            text = self.tokenizer.apply_chat_template(
                [m.to_dict() for m in messages], tokenize=False, add_generation_prompt=generate, **options, **self._options
            )
        except (ValueError, TemplateError) as error:
            roles = [m.role for m in messages]
            raise ValueError(f"the tokenizer's chat template cannot render the roles {roles}: {error}") from error
        return cast(str, text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
