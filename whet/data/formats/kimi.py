"""Kimi-K2: a section of calls, each with an id that the model writes.

`<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>...
<|tool_calls_section_end|>`. The id has the tool's name and the number of the call in the conversation, and comes back with the answer.
"""

from __future__ import annotations

import re

from whet.data.formats.blocks import CallBlocks
from whet.data.formats.format import Format
from whet.data.formats.reading import as_name, read_arguments
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import ToolCall

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
OPEN, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_BLOCKS = CallBlocks(OPEN, CLOSE, sections=(SECTION,), section_ends=(SECTION_END,))
_ID = re.compile(r"(?:functions\.)?(.+):(\d+)", re.DOTALL)


def parse_kimi(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply and the text around them."""
    return _BLOCKS.parse(text, _read_call)


def _read_call(text: str, at: int) -> tuple[ToolCall, int]:
    begin = text.find(ARGUMENTS, at)
    if begin < 0:
        raise ValueError(f"the tool call has no {ARGUMENTS}")
    call_id = text[at:begin].strip()
    named = _ID.fullmatch(call_id)
    if named is None:
        raise ValueError(f"the id of a tool call must be functions.NAME:NUMBER, not {call_id[:80]!r}")
    name = as_name(named[1].strip())
    arguments, at = read_arguments(text, begin + len(ARGUMENTS), name)
    return ToolCall(name, arguments, call_id), at


KIMI = Format(
    "kimi",
    parse_kimi,
    openers=(SECTION, OPEN),
    markup=(SECTION, SECTION_END, OPEN, ARGUMENTS, CLOSE),
    exact=True,
    keeps_ids=True,
    why_not_forced="the number in a call's id counts the calls of the conversation",
)
