"""The chat template by delta: token ids only ever grow, and what was sampled is never tokenised again.

A first prompt is rendered whole. A reply of the environment is rendered as the text that the template puts between the
end of an assistant's turn and the start of the next one. Supervised rows go through the same pieces, so that training,
rollout and evaluation see the same ids. A template that would rewrite earlier turns (drop their thinking, say) thus
never gets to: history stays as it was sampled.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from transformers import PreTrainedTokenizerFast

from whet.data.chat_template import ChatTemplate
from whet.data.config import ChatConfig
from whet.data.encoder import Encoder
from whet.data.formats.format import Format
from whet.data.formats.hermes import HERMES
from whet.data.formats.table import AUTO, AnyParser, choose_format
from whet.data.parsers import Parsed, ToolSchemas
from whet.data.replies import ReplyReader
from whet.data.special import ROLES, SpecialText
from whet.data.tokenizer import load_tokenizer, turn_ends
from whet.data.turns import MARK, MAX_ROLE, Dicts, after_call, after_reply, calling, find_ends, number, turn_tokens
from whet.types import JSON, Message, Task

SHARE_GPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""Roles of ShareGPT's rows, by what they are called elsewhere."""
__all__ = ["MARK", "Renderer", "load_renderer", "load_tokenizer"]


def load_renderer(folder: Path, chat: ChatConfig, parser: AnyParser = AUTO, *, trust_remote_code: bool = False) -> Renderer:
    """The renderer of a model folder.

    Args:
        folder: folder of a model.
        chat: settings of the rendering of messages.
        parser: format of the model's tool calls; `auto`: as the chat template tells.
        trust_remote_code: True if code that comes with the tokenizer may run.

    Raises:
        ValueError: there is no tokenizer, it or the template cannot be read, or the template lacks a variable that is set.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    check_variables(chat.template_kwargs, chat.template_text or tokenizer.chat_template)
    return Renderer(
        tokenizer,
        parser,
        chat.template_kwargs,
        template=chat.template_text,
        special_tokens_in_text=chat.special_tokens_in_text,
        ends=turn_ends(folder),
    )


def check_variables(given: Collection[str], template: object) -> None:
    """Refuse variables that a chat template does not have, which would change nothing.

    Raises:
        ValueError: naming the nearest that it has.
    """
    text = template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)
    for name in given:
        if re.search(rf"\b{re.escape(name)}\b", text) is None:
            words = sorted(set(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", text)))
            near = get_close_matches(name, words, 1, 0.8)
            hint = f"; did you mean {near[0]!r}?" if near else ": leave it out"
            raise ValueError(f"data.template_kwargs: the chat template has no variable {name!r}{hint}")


class Renderer:
    """Messages to token ids and back, for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        parser: format of the model's tool calls; `auto`: as the chat template tells.
        template_options: extra variables for the chat template, such as `enable_thinking`.
        template: a chat template's text in place of the tokenizer's own.
        special_tokens_in_text: have special tokens that a text of others spells become such; else they stay text.
        ends: ids that end a turn besides those that the tokenizer and the template know, as the model's own settings say.

    Raises:
        ValueError: the tokenizer has no eos_token, or there is no parser of that name.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        parser: AnyParser = HERMES,
        template_options: Mapping[str, JSON] | None = None,
        *,
        template: str | None = None,
        special_tokens_in_text: bool = False,
        ends: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token; set it in tokenizer_config.json to what ends a turn")
        self._encoder = Encoder(tokenizer)
        self._template = ChatTemplate(tokenizer, template, template_options or {})
        self._ends = find_ends(self._template, self._encoder)
        turns = turn_tokens(self._template, self._encoder, self._ends)
        self._special = None if special_tokens_in_text else SpecialText(self._encoder, self._template.source, turns)
        written = [cast(int, tokenizer.convert_tokens_to_ids(text)) for text in self._ends.texts]
        known = [token for token in ends if token in self._encoder.added]
        self._own_stops = tuple(dict.fromkeys((*written, cast(int, tokenizer.eos_token_id), *known)))
        self.strips = False
        """True if trajectories go on without the thinking that the chat template leaves out (`data.chat = "strip"`)."""
        self._read_calls(parser)

    def _read_calls(self, parser: AnyParser, *, whole: bool = False) -> None:
        self.chosen = choose_format(parser, self._template.source)
        """The format of tool calls, and why it is this one."""
        self.replies = ReplyReader(self._encoder, self._template, self.format, marks=self._special is not None, whole=whole)
        """Reads what was sampled."""
        stops = [token for token, text in self._encoder.added.items() if text in self.format.stops]
        self.stop_token_ids = tuple(dict.fromkeys((*self._own_stops, *stops)))
        """Tokens that end a turn: the token with which the template closes one (or opens the next, if
        nothing closes it), then the tokenizer's eos_token (often the same), then those of the model's
        own settings, then those of the format of its tool calls. A base model's eos_token is often not
        the token with which its chat template closes a turn; both end one."""

    @property
    def format(self) -> Format:
        """The format of tool calls."""
        return self.chosen.format

    def with_parser(self, parser: AnyParser, *, answers: bool = True) -> Renderer:
        """The same, for a model that writes tool calls in another way.

        Args:
            answers: False if no environment answers the calls: thinking then stays in the words, and a chat template may tell of a format
                that nothing here reads.

        Raises:
            ValueError: there is no parser of that name, or none that reads what the chat template tells of.
        """
        other = copy.copy(self)
        other._read_calls(parser, whole=not answers)
        if answers and other.chosen.fault:
            raise ValueError(other.chosen.fault)
        return other

    def with_thinking(self, wanted: bool) -> Renderer:
        """The same with thinking switched on or off, where the chat template has a variable for that."""
        other = copy.copy(self)
        other._template = self._template.with_thinking(wanted)
        return other

    def without_lost_thinking(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> tuple[Message, ...]:
        """The messages without the thinking that the chat template does not write.

        Raises:
            ValueError: the template cannot render messages of this form.
        """
        return self._template.without_lost_thinking(messages, tools)

    def stripping(self) -> Renderer:
        """The same, for trajectories whose turns see the thinking of earlier turns only where the chat template writes it."""
        other = copy.copy(self)
        other.strips = True
        return other

    def drops_thinking(self, messages: Sequence[Message], tools: ToolSchemas) -> frozenset[int]:
        """Places of the assistant's messages whose thinking the template leaves out before the next turn.

        A conversation that the template cannot render again loses nothing: it stays as it was sampled.
        """
        thinks = [i for i, message in enumerate(messages) if message.role == "assistant" and message.reasoning_content]
        numbered = [replace(m, reasoning_content=number(i, 1)) if i in thinks else m for i, m in enumerate(messages)]
        try:
            text = self.render(numbered, tools if self.format.listed else (), generate=True) if thinks else ""
        except ValueError:
            return frozenset()
        return frozenset(i for i in thinks if number(i, 1) not in text)

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of a sampled turn without its stop token."""
        return self.decode(tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens)

    @property
    def has_template(self) -> bool:
        """True if messages can be rendered."""
        return bool(self._template.source)

    @property
    def num_spelled(self) -> int:
        """Special tokens that texts of others spelled so far, and that stayed text."""
        return 0 if self._special is None else self._special.num_spelled

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece of text, with nothing added (no BOS either: write it into the text if
        the model needs one). A special token spelled in the text becomes one, so text of others goes
        through `plain`."""
        return self._encoder.encode(text)

    def plain(self, text: str, after: Sequence[int] = (), *, inner: bool = False) -> tuple[int, ...]:
        """The ids of a text of others, in which a special token that is spelled stays text.

        Args:
            after: the tokens that come before it.
            inner: what an assistant says, in which markup within a turn stays what it is.
        """
        marked = text if self._special is None else self._special.text(text, inner=inner)
        return self._encoder.encode(marked, after[-1] if after else None)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self._encoder.decode(tokens)

    def prompt(self, task: Task, tools: ToolSchemas = ()) -> tuple[int, ...]:
        """The ids of a task's first prompt, up to where the model begins.

        Args:
            task: a prompt of text is taken unchanged, the tokenizer's bos_token at its beginning included; messages go through the
                template.
            tools: the environment's; a tool that the task brings along under the same name is left out.

        Raises:
            ValueError: there is no chat template, or it cannot render these messages, or leaves something of them out.
        """
        if isinstance(task.prompt, str):
            begin = str(self.tokenizer.bos_token or "")
            if not begin or not task.prompt.startswith(begin):
                return self.plain(task.prompt)
            tokens = self.encode(begin)
            return (*tokens, *self.plain(task.prompt.removeprefix(begin), tokens))
        names = [tool["function"]["name"] for tool in tools]
        further = [tool for tool in task.tools if tool["function"]["name"] not in names]
        listed = (*tools, *further) if self.format.listed else ()
        text = self.render(task.prompt, listed, generate=True)
        self.check_roles(task.prompt)
        self._template.refuse_left_out(task.prompt, listed)
        return self._encoder.encode(text)

    def reply(self, messages: Sequence[Message], last: Sequence[int]) -> tuple[int, ...]:
        """The ids between a sampled turn and the next one: what closes the turn, the messages, and the next turn's
        opening.

        Args:
            messages: messages of the environment.
            last: the sampled turn; what of its closing it already holds is not added again.

        Raises:
            ValueError: the chat template cannot render these messages after an assistant's turn, or leaves something of them out.
        """
        if self.format.wrap is None or any(message.role != "tool" for message in messages):
            return self._answer(messages, self._marked(messages), last)
        text = "".join(map(self.format.wrap, messages))
        if last and last[-1] in self.stop_token_ids:  # the turn is closed: nothing can be appended to it
            asked = [Message("user", text.strip("\n"))]
            return self._answer(asked, self._marked(asked), last)
        return self.plain(text, last)

    def parse(self, tokens: Sequence[int], tools: ToolSchemas = (), prompt: Sequence[int] = (), stop: tuple[str, ...] = ()) -> Parsed:
        """A sampled turn as a message; the stop token at its end is no part of the text.

        Args:
            tools: those that the turn could call.
            prompt: the tokens before it, or the last of them.
            stop: texts that end the turn and are no part of it.
        """
        if tokens and tokens[-1] in self.stop_token_ids:
            tokens = tokens[:-1]
        return self.replies.read(tokens, tools, opened=self.replies.opens_thinking(prompt), stop=stop)

    def supervised(
        self, messages: Sequence[Message], tools: ToolSchemas = (), first_trained: int = 0, silent: Collection[int] = ()
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """A whole conversation as ids, and which of them train: those that an assistant wrote (its stop token included,
        its opening not).

        They are the ids of a rollout in which the model says the same. What follows the last assistant's message is
        left out. What the assistant says before the message `first_trained`, and in the messages `silent`, is context.

        Raises:
            ValueError: no message comes before the first of an assistant, or there is none of an assistant, or the
                template renders an assistant's message otherwise than by continuing its own generation prompt, or leaves
                something out.
        """
        places = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not places or places[0] == 0:
            what = "starts with an assistant's message" if places else "has no assistant's message to learn from"
            roles = [message.role for message in messages]
            raise ValueError(f"the conversation {what}, so there is no reply to a prompt in it; its roles are {roles}")
        marked, schemas = self._marked(messages), self._marked_tools(tools)
        tokens = list(self._encoder.encode(self._template(marked[: places[0]], schemas, True)))
        mask = [False] * len(tokens)
        for i, following in zip(places, [*places[1:], None], strict=True):
            reply_ids = self._reply_ids(marked[: i + 1], schemas, tokens[-1])
            tokens.extend(reply_ids)
            mask.extend([i >= first_trained and i not in silent] * len(reply_ids))
            if following is not None:
                context = self._answer(messages[i + 1 : following], marked[i + 1 : following], reply_ids)
                tokens.extend(context)
                mask.extend([False] * len(context))
        self._refuse_left_out(messages[: places[-1] + 1], tools)
        return tuple(tokens), tuple(mask)

    def render(self, messages: Sequence[Message], tools: ToolSchemas, *, generate: bool) -> str:
        """The template's text for messages, with the opening of an assistant's turn if `generate`. Special tokens that the messages spell
        are marked (`whet.data.encoder`): give it to `rendered`.

        Raises:
            ValueError: there is no chat template, or it cannot render these messages.
        """
        return self._template(self._marked(messages), self._marked_tools(tools), generate)

    def rendered(self, text: str) -> tuple[int, ...]:
        """The ids of a text that `render` gave."""
        return self._encoder.encode(text)

    def rendered_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text that `render` gave, and the start and end of each token in it."""
        return self._encoder.encode_with_places(text)

    def odd_role(self, messages: Sequence[Message], odd: Collection[str] | None = None) -> str:
        """Message about the first role that neither chat formats nor the template know; "": every role
        is known.

        Args:
            odd: the only roles to look for; None: all.
        """
        for i, role in enumerate(message.role for message in messages):
            named = role in ROLES or f"'{role}'" in self._template.source or f'"{role}"' in self._template.source
            if not named and (odd is None or role in odd):
                other = f"; write {SHARE_GPT[role]!r} for it" if role in SHARE_GPT else ""
                what = f"message {i} has the role {role[:MAX_ROLE]!r}, which neither chat formats nor the chat template know{other}"
                return f"{what}; roles are {', '.join(sorted(ROLES))}"
        return ""

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Refuse ShareGPT's roles: a template that writes any role would write them unchanged.

        Raises:
            ValueError: with the role to write instead.
        """
        if odd := self.odd_role(messages, SHARE_GPT):
            raise ValueError(odd)

    def check_answers(self, names: Sequence[str]) -> None:
        """See that the template shows the answers of tools with these names.

        Raises:
            ValueError: it has no place for them.
        """
        for name in names:
            self.reply([Message("tool", "an answer", name=name, tool_call_id="call_0")], ())

    def _answer(self, messages: Sequence[Message], marked: Dicts, last: Sequence[int]) -> tuple[int, ...]:
        tail = self._tail(messages, marked)
        if last and last[-1] in self.stop_token_ids:
            ended = self.decode(last[-1:])
            for closing in (ended, self.format.closing) if ended in self.format.stops and self.format.closing else (ended,):
                before, held, after = tail.partition(closing)
                if held and not before.strip():  # some templates put a space between a text and its end
                    tail = after
                    break
        return self._encoder.encode(tail, last[-1] if last else None)

    def _tail(self, messages: Sequence[Message], marked: Dicts) -> str:
        """Text that the template writes between an assistant's turn and its next one, for the messages
        between them. Some templates write a tool's answer only after a call."""
        asked = Message("user", "u")
        try:
            tail = after_reply(self._template, marked, generate=True)
            self._template.refuse_left_out((asked, Message("assistant", "a"), *messages), (), first=2)
        except ValueError:
            if all(message.role != "tool" for message in messages):
                raise
            tail = after_call(self._template, self._encoder, marked, self._ends)
            self._template.refuse_left_out((asked, calling(marked), *messages), (), first=2)
        return tail

    def _reply_ids(self, marked: Dicts, tools: Dicts, before_it: int) -> tuple[int, ...]:
        """Tokens that a model would have sampled for the last message after the token `before_it`, its
        stop token included."""
        before = self._template(marked[:-1], tools, True)
        after = self._template(marked, tools, False)
        if not after.startswith(before):
            same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            raise ValueError(
                f"the chat template does not render message {len(marked) - 1} (assistant) after its own generation "
                f"prompt: it writes {after[same : same + 40]!r} where the prompt has {before[same : same + 40]!r}; a variable of the "
                "template (data.template_kwargs), such as enable_thinking, may settle it"
            )
        written, calls = after[len(before) :], "tool_calls" in marked[-1]
        for stop in self._ends.of(calls=calls):
            text, closed, _ = written.rpartition(stop)
            if closed:
                return (*self._encoder.encode(text, before_it), cast(int, self.tokenizer.convert_tokens_to_ids(stop)))
        # The template ends a turn with plain text, or with nothing; a model ends it with a token all the same.
        if not self._ends.texts:
            written = written.removesuffix(after_reply(self._template, (), generate=False))
        stop = next(iter(self._ends.of(calls=calls)), None)
        ends = self.stop_token_ids[0] if stop is None else cast(int, self.tokenizer.convert_tokens_to_ids(stop))
        return (*self._encoder.encode(written, before_it), ends)

    def _refuse_left_out(self, messages: Sequence[Message], tools: ToolSchemas) -> None:
        """See that nothing of a conversation is left out turn by turn: thinking that the template drops later is written in its turn."""
        silent = [replace(message, reasoning_content=None) for message in messages]
        self._template.refuse_left_out(silent, tools)
        for i, message in enumerate(messages):
            if message.reasoning_content:
                self._template.refuse_left_out([*silent[:i], message], tools, first=i)

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, JSON]]:
        came_as_text = any(call.text is not None for message in messages for call in message.tool_calls)
        as_written = came_as_text and self._template.writes_text
        marked = Message.to_dict if self._special is None else self._special.message
        return [marked(message, as_written=as_written) for message in messages]

    def _marked_tools(self, tools: ToolSchemas) -> list[dict[str, JSON]]:
        return [dict(tool) if self._special is None else self._special.value(tool) for tool in tools]
