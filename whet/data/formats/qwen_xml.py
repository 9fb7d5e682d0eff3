"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3: a call's arguments are written one by one, as bare text.

`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, a value between two line breaks. A value has no
quotes and no escapes, so the tool's schema says what type it is. `</parameter>` in a value is text, unless the next argument or the
call's end follows it.
"""

from __future__ import annotations

import re

from whet.data.formats.blocks import CallBlocks
from whet.data.formats.format import Format
from whet.data.formats.reading import as_name, skip_space, typed
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import JSON, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME = 256
_BLOCKS = CallBlocks(OPEN, CLOSE, strays=(FUNCTION,))
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")


def parse_qwen_xml(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply and the text around them."""
    return _BLOCKS.parse(text, lambda text, at: _read_call(text, at, tools))


def _read_call(text: str, at: int, tools: ToolSchemas) -> tuple[ToolCall, int]:
    name, at = _tag(text, skip_space(text, at), FUNCTION)
    arguments: dict[str, JSON] = {}
    while not text.startswith(FUNCTION_END, at := skip_space(text, at)):
        key, at = _tag(text, at, PARAMETER)
        end = _VALUE_END.search(text, at)
        if end is None:
            behind = f"{PARAMETER}...> or {FUNCTION_END} behind it"
            raise ValueError(f"the parameter {key} of {name} is never closed by {PARAMETER_END} with {behind}")
        if key in arguments:
            raise ValueError(f"the parameter {key} of {name} is written twice")
        begin = at + text.startswith("\n", at)
        arguments[key] = typed(text[begin : max(end.start(), begin)], tools, name, key)
        at = end.end()
    return ToolCall(name, arguments), at + len(FUNCTION_END)


def _tag(text: str, at: int, opener: str) -> tuple[str, int]:
    """The name in `<opener=name>`, and the place behind it."""
    if not text.startswith(opener, at):
        raise ValueError(f"the tool call has {text[at : at + 20]!r} where {opener}...> is due")
    end = text.find(">", at, at + len(opener) + MAX_NAME)
    if end < 0:
        raise ValueError(f"a {opener} is not closed by >")
    return as_name(text[at + len(opener) : end].strip()), end + 1


QWEN_XML = Format(
    "qwen_xml",
    parse_qwen_xml,
    openers=(OPEN,),
    markup=(OPEN, CLOSE),
    exact=True,
    why_not_forced="it writes arguments as bare text, one by one",
)
