"""The chat template by delta: token ids only ever grow, and what was sampled is never tokenised again.

A first prompt is rendered whole. A reply of the environment is rendered as the text that the template puts between the
end of an assistant's turn and the start of the next one. Supervised rows go through the same pieces, so that training,
rollout and evaluation see the same ids. A template that would rewrite earlier turns (drop their thinking, say) thus
never gets to: history stays as it was sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from whet.data.parsers import Parsed, Parser, parse_hermes
from whet.model.causal import read_config
from whet.types import JSON, Message, Task

MARK = "\u2063whet\u2063"
"""Stands for an assistant's text while a delta is cut out; invisible separators keep it from occurring in real text."""

Tools = Sequence[Mapping[str, JSON]]


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder.

    Raises:
        ValueError: if there is none, or it cannot be read, or it has tokens that the folder's model does not have.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(f"model.path: {folder} has no tokenizer.json or tokenizer_config.json; copy the model's own there")
    vocab_size = _vocab_size(folder, trust_remote_code)
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raise bare Exceptions, too
        what = f"{type(error).__name__}: {error}; copy the model's own tokenizer files there"
        raise ValueError(f"model.path: the tokenizer of {folder} cannot be loaded: {what}") from error
    tokenizer = cast(PreTrainedTokenizerFast, loaded)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size, folder)
    return tokenizer


def _vocab_size(folder: Path, trust_remote_code: bool) -> int | None:
    """Of the model in the folder; None where there is no language model, which loading it will say."""
    if not (folder / "config.json").is_file():
        return None
    text = read_config(folder, trust_remote_code=trust_remote_code).get_text_config()
    return text.vocab_size if hasattr(text, "vocab_size") else None


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int, folder: Path) -> None:
    """See that the model has every token that text can become. It may have more: many models' sizes are rounded up.

    Padding and the placeholders of images and sounds may lie beyond: no text of whet's becomes one.

    Raises:
        ValueError: naming tokens that the model does not have.
    """
    written = ("bos_token", "eos_token", "unk_token")
    unused = {str(text) for name, text in tokenizer.special_tokens_map.items() if name not in written}
    beyond = {text: i for text, i in tokenizer.get_vocab().items() if i >= vocab_size and text not in unused}
    if beyond:
        some = ", ".join(f"{text!r} ({i})" for text, i in sorted(beyond.items(), key=lambda item: item[1])[:3])
        raise ValueError(
            f"model.path: the tokenizer of {folder} has {len(beyond)} tokens that its model does not have, among them {some}: "
            f"the model's vocab_size is {vocab_size}, so its ids end at {vocab_size - 1}. Copy the model's own tokenizer files "
            "there, or, where tokens were added on purpose, resize the model's embeddings to them"
        )


class Renderer:
    """Messages to token ids and back, for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        parser: how the model writes tool calls.
        template_options: extra variables for the chat template, such as `enable_thinking`.

    Raises:
        ValueError: the tokenizer has no eos_token.
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
            raise ValueError("the tokenizer has no eos_token; set it in tokenizer_config.json to what ends a turn")
        self._encode = lru_cache(maxsize=4096)(self._encode_text)
        self.stop_token_ids = self._find_stop_tokens(cast(int, tokenizer.eos_token_id))
        """What ends a turn: the token with which the template closes one, then the tokenizer's eos_token (often the
        same)."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a piece of text, without anything added (no BOS either: write it into the text where the model
        wants one)."""
        return self._encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def prompt(self, task: Task, tools: Tools = ()) -> tuple[int, ...]:
        """The ids of a task's first prompt, up to where the model begins.

        Args:
            task: a prompt of text is taken as it stands; messages go through the template.
            tools: the environment's; a tool that the task brings along under the same name is left out.

        Raises:
            ValueError: there is no chat template, or it cannot render these messages.
        """
        if isinstance(task.prompt, str):
            return self.encode(task.prompt)
        names = [tool["function"]["name"] for tool in tools]
        further = [tool for tool in task.tools if tool["function"]["name"] not in names]
        return self.encode(self.render(task.prompt, (*tools, *further), generate=True))

    def reply(self, messages: Sequence[Message], last: Sequence[int]) -> tuple[int, ...]:
        """The ids between a sampled turn and the next one: what closes the turn, the messages, and the next turn's
        opening.

        Args:
            messages: what the environment says.
            last: the sampled turn; what of its closing it already holds is not added again.

        Raises:
            ValueError: the chat template cannot render these messages after an assistant's turn.
        """
        tail = self._tail(messages, generate=True)
        if last and last[-1] in self.stop_token_ids:
            before, held, after = tail.partition(self.decode(last[-1:]))
            if held and not before.strip():  # some templates put a space between a text and its end
                tail = after
        return self.encode(tail)

    def parse(self, tokens: Sequence[int]) -> Parsed:
        """A sampled turn as a message; the stop token at its end is no part of the text."""
        if tokens and tokens[-1] in self.stop_token_ids:
            tokens = tokens[:-1]
        return self._parser(self.decode(tokens))

    def supervised(
        self, messages: Sequence[Message], tools: Tools = (), first_trained: int = 0, silent: Collection[int] = ()
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """A whole conversation as ids, and which of them train: those that an assistant wrote (its stop token included,
        its opening not).

        They are the ids of a rollout in which the model says the same. What follows the last assistant's message is
        left out. What the assistant says before the message `first_trained`, and in the messages `silent`, is context.

        Raises:
            ValueError: no message comes before the first of an assistant, or there is none of an assistant, or the
                template renders an assistant's message otherwise than by continuing its own generation prompt.
        """
        places = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not places or places[0] == 0:
            what = "starts with an assistant's message" if places else "has no assistant's message to learn from"
            roles = [message.role for message in messages]
            raise ValueError(f"the conversation {what}, so there is no reply to a prompt in it; its roles are {roles}")
        tokens = list(self.encode(self.render(messages[: places[0]], tools, generate=True)))
        mask = [False] * len(tokens)
        for i, following in zip(places, [*places[1:], None], strict=True):
            said = self._said(messages[: i + 1], tools)
            tokens.extend(said)
            mask.extend([i >= first_trained and i not in silent] * len(said))
            if following is not None:
                context = self.reply(messages[i + 1 : following], said)
                tokens.extend(context)
                mask.extend([False] * len(context))
        return tuple(tokens), tuple(mask)

    def _said(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """What a model would have sampled to say the last message, its stop token included."""
        before = self.render(messages[:-1], tools, generate=True)
        after = self.render(messages, tools, generate=False)
        if not after.startswith(before):
            same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            raise ValueError(
                f"the chat template does not render message {len(messages) - 1} (assistant) after its own generation "
                f"prompt: it writes {after[same : same + 40]!r} where the prompt has {before[same : same + 40]!r}; "
                "a template option such as enable_thinking may settle it"
            )
        stop = self.stop_token_ids[0]
        said = after[len(before) :]
        text, closed, _ = said.rpartition(self.decode([stop]))
        if not closed:  # the template ends a turn with plain text; a model ends it with a token all the same
            text = said.removesuffix(self._tail((), generate=False))
        return (*self.encode(text), stop)

    def _tail(self, messages: Sequence[Message], *, generate: bool) -> str:
        """What the template writes after an assistant's text when these messages follow."""
        text = self.render((Message("user", "u"), Message("assistant", MARK), *messages), (), generate=generate)
        _, found, tail = text.partition(MARK)
        if not found:
            raise ValueError("the chat template leaves an assistant's text out, so it cannot be used turn by turn")
        return tail

    def _find_stop_tokens(self, eos: int) -> tuple[int, ...]:
        """A base model's eos_token is often not the token that its chat template closes a turn with; both end one."""
        if not self.tokenizer.chat_template:
            return (eos,)
        try:
            closing = self.encode(self._tail((), generate=False).lstrip())[:1]
        except ValueError:  # it wants more than a question and an answer; `prompt` and `reply` will say what
            return (eos,)
        added = [token for token in closing if token in self.tokenizer.added_tokens_decoder]
        return tuple(dict.fromkeys((*added, eos)))

    def render(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str:
        """The template's text for messages, with the opening of an assistant's turn if `generate`.

        Raises:
            ValueError: there is no chat template, or it cannot render these messages.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, so it cannot render messages: put the model's chat_template.jinja "
                "into its folder, or set data.chat=false for prompts that are plain text"
            )
        options: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        try:
            dicts = [message.to_dict() for message in messages]
            text = self.tokenizer.apply_chat_template(
                dicts, tokenize=False, add_generation_prompt=generate, **options, **self._options
            )
        except (ValueError, TypeError, TemplateError) as error:
            roles = [m.role for m in messages]
            raise ValueError(f"the tokenizer's chat template cannot render the roles {roles}: {error}") from error
        return cast(str, text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
