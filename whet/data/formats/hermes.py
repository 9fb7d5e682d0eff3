"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

from whet.data.formats.blocks import CallBlocks
from whet.data.formats.format import Forced, Format
from whet.data.formats.reading import as_arguments, as_name, read_json
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCKS = CallBlocks(OPEN, CLOSE)


def parse_hermes(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply and the text around them. The JSON of a call may hold `</tool_call>` in its strings."""
    return _BLOCKS.parse(text, _read_call)


def _read_call(text: str, at: int) -> tuple[ToolCall, int]:
    value, at = read_json(text, at)
    if not isinstance(value, dict):
        raise ValueError(f"the tool call must be a JSON object with name and arguments, not {type(value).__name__}")
    name = as_name(value.get("name"))
    return ToolCall(name, as_arguments(value.get("arguments", {}), name)), at


HERMES = Format(
    "hermes",
    parse_hermes,
    openers=(OPEN,),
    markup=(OPEN, CLOSE),
    forced=Forced("", lambda name: f'{OPEN}\n{{"name": {name}, "arguments": ', f"}}\n{CLOSE}", "\n"),
)
