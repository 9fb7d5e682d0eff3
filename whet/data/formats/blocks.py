"""Replies with calls between an opening and a closing text, alone or within a section of calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from whet.data.formats.reading import ReplyParts, TooManyCalls, markup_pattern, outside_thinking, skip_space
from whet.data.parsers import Parsed
from whet.types import ToolCall

ReadCall = Callable[[str, int], tuple[ToolCall, int]]
"""Reads the call whose parts begin at a place of a text; returns it and the place behind it. Raises ValueError if there is none."""


@dataclass(frozen=True, slots=True)
class CallBlocks:
    """Text around calls."""

    open: str
    close: str
    strays: tuple[str, ...] = ()
    """Texts, besides the closing one, that mean a call without its opening."""
    sections: tuple[str, ...] = ()
    """Texts that open a section of calls; text between its calls is no part of the words."""
    section_ends: tuple[str, ...] = ()
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        close = () if self.sections else (self.close,)
        texts = (self.open, *close, *self.strays, *self.sections, *self.section_ends)
        object.__setattr__(self, "pattern", markup_pattern(*texts))

    def parse(self, text: str, read_call: ReadCall) -> Parsed:
        """The calls of a reply and the text around them. A call that is never closed ends the words."""
        reply = ReplyParts()
        with suppress(TooManyCalls):
            self._read(text, read_call, reply)
        return reply.parsed()

    def _read(self, text: str, read_call: ReadCall, reply: ReplyParts) -> None:
        spoken, at, within, stray = 0, 0, False, ""
        while (found := outside_thinking(text, self.pattern, at)) is not None:
            at = found.end()
            if found[0] not in (self.open, *self.sections, *self.section_ends):
                stray = stray or found[0]
                continue
            if not within:
                reply.say(text[spoken : found.start()])
            if found[0] == self.open:
                at = self._call(text, at, read_call, reply)
            elif found[0] in self.sections and not text.startswith(self.open, skip_space(text, at)):
                reply.fault(f"a {found[0]} has no {self.open} behind it")
            spoken, within = at, bool(self.sections) and found[0] not in self.section_ends
        if not within:
            reply.say(text[spoken:])
        if stray:
            reply.fault(f"a {stray} has no {self.open} before it")

    def _call(self, text: str, at: int, read_call: ReadCall, reply: ReplyParts) -> int:
        """Read the call behind an opening; the place behind the call."""
        call, fault = None, ""
        try:
            call, at = read_call(text, at)
        except ValueError as error:
            fault = str(error)
        close = text.find(self.close, at)
        if close < 0:
            reply.fault(f"a {self.open} is never closed by {self.close}")
            return len(text)
        if call is not None and skip_space(text, at) != close:
            fault = f"there is more text behind the call of {call.name}, before {self.close}"
        if fault or call is None:
            reply.fault(fault)
        else:
            reply.call(call.name, call.arguments, call.id)
        return close + len(self.close)
