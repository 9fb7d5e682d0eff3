"""Text that a chat template writes around turns: how turns end, the text between a call and its answer,
and the parts that it leaves out.

All of it is found by rendering conversations made for this purpose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from whet.data.encoder import Encoder, spelled
from whet.types import JSON, Message, ToolCall

MARK = "\u2063whet\u2063"
"""Placeholder for an assistant's text while a delta is cut out; invisible separators keep it from
occurring in real text."""

MAX_ROLE = 80
"""Characters of a role shown in an error about words that a template leaves out."""
MAX_TOLD = 3
"""Calls of a message that are named where a template leaves them out."""

Dicts = Sequence[Mapping[str, JSON]]
Apply = Callable[[Dicts, Dicts, bool], str]
"""Messages and tools, as templates read them, and whether the opening of an assistant's turn is wanted; to text. Raises ValueError."""
_USER = Message("user", "u")
_TAG = re.compile(r"<\/?[\w.-]+>|\[\/?[\w.-]+\]")


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The added tokens that end an assistant's turn, as texts; empty if no token does."""

    closing: str = ""
    """Text with which the template closes every turn."""
    called: str = ""
    """Text that the template writes after a call that needs an answer, if it is another token."""
    user: str = ""
    """Text that begins a user's turn, if nothing closes a turn."""
    tool: str = ""
    """The same of a tool's answer."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Each once, the closing one first."""
        return tuple(dict.fromkeys(text for text in (self.closing, self.called, self.user, self.tool) if text))

    def of(self, *, calls: bool) -> tuple[str, ...]:
        """Texts that may end a turn, with calls or without, the likeliest first."""
        after = (self.tool, self.user) if calls else (self.user,)
        return tuple(text for text in ((self.called if calls else ""), self.closing, *after) if text)


def find_ends(apply: Apply, encoder: Encoder) -> TurnEnds:
    """The tokens with which the template ends an assistant's turn; empty if it cannot render a question
    and an answer."""
    try:
        closing = _first(encoder, after_reply(apply, (), generate=False))
    except ValueError:  # it wants more than that; rendering a prompt shows what
        return TurnEnds()
    called = _behind_call(apply, encoder)
    if closing:
        return TurnEnds(closing, called if called != closing else "")
    return TurnEnds("", called, *(_opener(apply, encoder, role) for role in ("user", "tool")))


def turn_tokens(apply: Apply, encoder: Encoder, ends: TurnEnds) -> frozenset[str]:
    """The added tokens that the template writes around turns of a user, an assistant and a tool, those of an opening and closing tag that
    belong to the assistant's own text left out."""
    found = set(ends.texts)
    for messages in ((_USER,), (_USER, Message("assistant", "a"), _USER)):
        try:
            texts = encoder.added_in(apply([message.to_dict() for message in messages], (), False))
        except ValueError:
            continue
        found.update(text for text in texts if len(messages) == 1 or not _TAG.fullmatch(text))
    answer = [Message("tool", "v", name="f", tool_call_id="call_0").to_dict()]
    for tail in (lambda: after_reply(apply, answer, generate=False), lambda: after_call(apply, encoder, answer, ends, generate=False)):
        try:
            found.update(encoder.added_in(tail()))
        except ValueError:  # it has no place for answers there
            continue
    return frozenset(found)


def after_reply(apply: Apply, messages: Dicts, *, generate: bool) -> str:
    """Text that the template writes after an assistant's text, before the given messages.

    Raises:
        ValueError: the template leaves the assistant's text out, or cannot render the messages there.
    """
    asked = [_USER.to_dict(), Message("assistant", MARK).to_dict()]
    _, found, tail = apply([*asked, *messages], (), generate).partition(MARK)
    if not found:
        raise ValueError("the chat template leaves an assistant's text out, so it cannot be used turn by turn")
    return tail


def after_call(apply: Apply, encoder: Encoder, messages: Dicts, ends: TurnEnds, *, generate: bool = True) -> str:
    """Text that the template writes after an assistant's calls, before the given answers, with the end
    of the calling turn.

    Raises:
        ValueError: the template cannot render calls, or the answers after them.
    """
    asked = [_USER.to_dict(), calling(messages).to_dict()]
    without, whole = apply(asked, (), False), apply([*asked, *messages], (), generate)
    same = next((i for i, (a, b) in enumerate(zip(without, whole, strict=False)) if a != b), min(len(without), len(whole)))
    for match in spelled(list(encoder.added.values())).finditer(whole):
        if match.start() < same < match.end():  # both begin with a token's first letters
            same = match.start()
    ended = whole[:same].rstrip()
    closing = next((text for text in ends.of(calls=True) if ended.endswith(text)), "")
    return whole[len(ended) - len(closing) :] if closing else whole[same:]


def calling(answers: Dicts) -> Message:
    """An assistant's message that calls for these answers of tools."""
    asked = [message for message in answers if message["role"] == "tool"]
    calls = (ToolCall(str(m.get("name") or "f"), {"a": "1"}, str(m.get("tool_call_id") or f"call_{i}")) for i, m in enumerate(asked))
    return Message("assistant", "", tuple(calls))


def left_out(apply: Apply, messages: Sequence[Message], tools: Dicts, first: int) -> str:
    """Description of the parts of such messages that the template does not write; empty: it writes all.
    It renders messages of the same form with numbers in them.

    Args:
        first: index of the first message to check. The messages before it are only context, and may be
            left out.

    Raises:
        ValueError: the template cannot render messages of this form.
    """
    numbered = [_numbered(i, message) for i, message in enumerate(messages)]
    text = _Text(apply([message.to_dict() for message in numbered], tools, False))
    for i, message in enumerate(numbered[first:], start=first):
        thinking = [] if text.has(message.reasoning_content or "") else ["the thinking (reasoning_content)"]
        words = [] if text.has(message.content) else ["the words"]
        calls = (f"call {k}" for k, call in enumerate(message.tool_calls) if not _shows(text, call))
        if missing := [*islice(calls, MAX_TOLD), *thinking, *words]:
            what = " and ".join(missing)
            return f"{what} of message {i} ({message.role[:MAX_ROLE]})"
    return ""


def thoughts_written(apply: Apply, messages: Sequence[Message], tools: Dicts) -> set[int]:
    """Places of the messages whose thinking the template writes, found as in `left_out`.

    Raises:
        ValueError: the template cannot render messages of this form.
    """
    numbered = [_numbered(i, message) for i, message in enumerate(messages)]
    text = apply([message.to_dict() for message in numbered], tools, True)
    return {i for i, message in enumerate(numbered) if message.reasoning_content and message.reasoning_content in text}


class _Text:
    """A text in which parts are looked for from where the last one was found: templates write messages in their order."""

    def __init__(self, text: str) -> None:
        self._text, self._last = text, 0

    def has(self, part: str) -> bool:
        at = self._text.find(part, self._last)
        if at < 0:
            return part in self._text
        self._last = at
        return True


def _numbered(place: int, message: Message) -> Message:
    calls = tuple(_numbered_call(place, k, call) for k, call in enumerate(message.tool_calls))
    words = number(place, 0) if message.content else ""
    thinking = number(place, 1) if message.reasoning_content else message.reasoning_content
    return Message(message.role, words, calls, message.name, message.tool_call_id, thinking)


def _numbered_call(place: int, k: int, call: ToolCall) -> ToolCall:
    """The call with numbers in it; some formats write its name in its id alone."""
    name = number(place, 2 * k + 2)
    arguments = {key: number(place, 2 * k + 3) for key in list(call.arguments)[:1]}
    return ToolCall(name, arguments, call.id.replace(call.name, name) if call.name else call.id)


def number(place: int, part: int) -> str:
    """Twelve digits that no template writes, for a part of the message at a place."""
    return f"83{place:05d}{part:03d}47"


def _shows(text: _Text, call: ToolCall) -> bool:
    return text.has(call.name) and all(text.has(str(value)) for value in call.arguments.values())


def _first(encoder: Encoder, text: str) -> str:
    """The added token that a text begins with, spaces apart."""
    tokens = encoder.encode(text.lstrip())[:1]
    return next((encoder.added[token] for token in tokens if token in encoder.added), "")


def _opener(apply: Apply, encoder: Encoder, role: str) -> str:
    try:
        return _first(encoder, after_reply(apply, [Message(role, "v", name="f", tool_call_id="call_0").to_dict()], generate=True))
    except ValueError:  # it has no such role
        return ""


def _behind_call(apply: Apply, encoder: Encoder) -> str:
    """The added token that the template writes after calls: the last one, unless it also comes between
    two calls and so ends each of them."""
    calls = [ToolCall("f", {"a": number(0, k)}, f"call_{k}") for k in range(2)]
    texts: list[str] = []
    for count in (1, 2):
        try:
            texts.append(apply([_USER.to_dict(), Message("assistant", "", tuple(calls[:count])).to_dict()], (), False))
        except ValueError:  # it has no calls, or one at most
            break
    if not texts or number(0, 0) not in texts[0]:
        return ""
    last = next((text for text in sorted(encoder.added.values(), key=len, reverse=True) if texts[0].rstrip().endswith(text)), "")
    if len(texts) < 2 or number(0, 1) not in texts[1]:  # it writes one call at most
        return last if last in encoder.special else ""
    return "" if last in texts[1].partition(number(0, 0))[2].partition(number(0, 1))[0] else last
