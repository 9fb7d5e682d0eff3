"""Sampled tokens to messages: the thinking is put apart, then the calls of what follows are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from whet.data.chat_template import ChatTemplate
from whet.data.encoder import Encoder, spelled
from whet.data.formats.format import Format
from whet.data.formats.reading import THINK, THINK_END, markup_pattern, outside_thinking
from whet.data.parsers import Malformed, Parsed, ToolSchemas
from whet.types import JSON, Message, text_before

TAIL = 16
"""Tokens of a prompt in which an opening of thinking at its end is looked for."""


@dataclass(frozen=True, slots=True)
class Split:
    """A reply's text in parts."""

    head: str
    """Thinking at the beginning with its tags, as far as the reply has them; empty: it does not begin with any."""
    thinking: str | None
    """The same without the tags; None: it does not begin with any."""
    body: str
    """The rest."""
    closed: bool = True
    """False if the reply goes on within thinking."""


class ReplyReader:
    """Reads the replies of a model.

    Args:
        encoder: encoder of the tokenizer.
        template: the chat template.
        chosen: format of the model's tool calls.
        marks: True if the encoder has marks for special tokens that a text spells.
        whole: True if thinking stays in the words, whatever the chat template writes.
    """

    def __init__(self, encoder: Encoder, template: ChatTemplate, chosen: Format, *, marks: bool, whole: bool) -> None:
        self._encoder, self._template, self.format, self._whole = encoder, template, chosen, whole
        own = {token: text for token, text in encoder.added.items() if text in chosen.markup}
        self._tokens = frozenset(own) if chosen.exact and marks else frozenset[int]()
        """Ids of the markup that counts as such only as a token."""
        self._spelled = spelled(sorted(own.values())) if self._tokens else None
        openers = chosen.openers or ()
        self._openers, self._opener = openers, markup_pattern(*openers)

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends within thinking, which the reply goes on with."""
        return self.format.thinks and self._encoder.decode(prompt[-TAIL:]).rstrip().endswith(THINK)

    def read(self, tokens: Sequence[int], tools: ToolSchemas, *, opened: bool, stop: tuple[str, ...] = ()) -> Parsed:
        """A reply without its stop token as a message.

        Args:
            tools: those that the reply could call.
            opened: True if the prompt ends within thinking.
            stop: texts that end the reply and are no part of it.
        """
        text = text_before(self._encoder.decode(tokens), stop)
        apart = text_before(self._set_apart(tokens, text), stop)
        parsed = self._parsed(apart, tools, opened)
        return parsed if apart is text else self._restored(parsed)

    def split(self, text: str, *, opened: bool) -> Split:
        """A reply's text, or its beginning, in its thinking and what follows."""
        begin = 0
        if not opened:
            begin = len(text) - len(text.lstrip())
            if not text.startswith(THINK, begin):
                return Split("", None, text)
            begin += len(THINK)
        end = text.find(THINK_END, begin)
        if end < 0:
            return Split(text, text[begin:], "", closed=False)
        behind = end + len(THINK_END)
        return Split(text[:behind], text[begin:end], text[behind:])

    def visible(self, text: str, *, opened: bool) -> tuple[str, str]:
        """The thinking and the words in the beginning of a reply, as far as no later text changes them; calls are no part of either."""
        if self.format.visible is not None:
            return self.format.visible(text)
        if self.format.openers is None:
            return "", ""
        if not self.puts_apart:
            return "", self._words(text)
        if not opened and THINK.startswith(text.strip()):
            return "", ""
        split = self.split(text, opened=opened)
        if split.thinking is None:
            return "", self._words(text)
        inner = split.thinking
        if not split.closed:
            inner = inner[: len(inner) - held_back(inner, THINK_END)]
        return inner.strip(), self._words(split.body)

    @property
    def puts_apart(self) -> bool:
        """True if thinking is put apart from the words."""
        return self.format.thinks and not self._whole and self._template.writes_thinking

    def _words(self, text: str) -> str:
        """The words before the first call, without what may be the beginning of one."""
        found = outside_thinking(text, self._opener, 0) if self._openers else None
        if found is not None:
            text = text[: found.start()]
        else:
            text = text[: len(text) - max((held_back(text, opener) for opener in self._openers), default=0)]
        return text.strip("\n")

    def _parsed(self, text: str, tools: ToolSchemas, opened: bool) -> Parsed:
        if not self.format.thinks:
            return self.format.parse(text, tools)
        split = self.split(text, opened=opened)
        parsed = self.format.parse(split.body, tools)
        if split.thinking is None:
            return parsed
        if self.puts_apart:
            return replace(parsed, message=replace(parsed.message, reasoning_content=split.thinking.strip() or None))
        gap = split.body[: len(split.body) - len(split.body.lstrip("\n"))]
        return replace(parsed, message=replace(parsed.message, content=(split.head + gap + parsed.message.content).strip("\n")))

    def _set_apart(self, tokens: Sequence[int], text: str) -> str:
        """The text with marks in the markup that is spelled in other tokens; the same object if there is none."""
        if self._spelled is None:
            return text
        num_tokens = sum(token in self._tokens for token in tokens)
        if sum(1 for _ in self._spelled.finditer(text)) == num_tokens:
            return text
        pieces: list[str] = []
        begin = 0
        for i, token in enumerate((*tokens, None)):
            if token is None or token in self._tokens:
                pieces.append(self._encoder.mark(self._encoder.decode(tokens[begin:i]), self._spelled)[0] if i > begin else "")
                pieces.append("" if token is None else self._encoder.added[token])
                begin = i + 1
        apart = "".join(pieces)
        return apart if self._encoder.unmark(apart).startswith(text) else text

    def _restored(self, parsed: Parsed) -> Parsed:
        """The message and faults of a text with marks, without them."""
        plain = self._encoder.unmark
        calls = tuple(
            replace(call, name=plain(call.name), id=plain(call.id), arguments=cast("Mapping[str, JSON]", self._value(call.arguments)))
            for call in parsed.message.tool_calls
        )
        thinking = parsed.message.reasoning_content
        thinking = None if thinking is None else plain(thinking)
        message = Message("assistant", plain(parsed.message.content), calls, reasoning_content=thinking)
        return Parsed(message, tuple(Malformed(plain(fault.text), fault.place) for fault in parsed.malformed))

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._encoder.unmark(value)
        if isinstance(value, Mapping):
            return {self._encoder.unmark(key): self._value(item) for key, item in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list):
            return [self._value(item) for item in cast("list[Any]", value)]
        return value


def held_back(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that may be the begin of the marker."""
    longest = min(len(marker) - 1, len(text))
    end = text[len(text) - longest :]
    at = end.find(marker[0]) if longest else -1
    while at >= 0:
        if marker.startswith(end[at:]):
            return longest - at
        at = end.find(marker[0], at + 1)
    return 0
