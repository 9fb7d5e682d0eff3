"""GLM-4.5 to GLM-5: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`.

GLM-4.5 and 4.6 write a line break between the parts, GLM-5 none. A string is bare text, anything else is JSON. Nothing closes a turn:
its last sampled token is the one that opens the next turn, `<|user|>`, or `<|observation|>` behind a call.
"""

from __future__ import annotations

import re

from whet.data.formats.blocks import CallBlocks
from whet.data.formats.format import Format
from whet.data.formats.reading import as_name, skip_space, typed
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import JSON, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_BLOCKS = CallBlocks(OPEN, CLOSE)
_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
_NAME_END = re.compile(r"\n|<arg_key>|<arg_value>|</?tool_call>")


def parse_glm(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply and the text around them."""
    return _BLOCKS.parse(text, lambda text, at: _read_call(text, at, tools))


def _read_call(text: str, at: int, tools: ToolSchemas) -> tuple[ToolCall, int]:
    at = skip_space(text, at)
    found = _NAME_END.search(text, at)
    end = len(text) if found is None else found.start()
    name, at = as_name(text[at:end].strip()), end
    arguments: dict[str, JSON] = {}
    while not text.startswith(CLOSE, at := skip_space(text, at)):
        key, at = _key(text, at, name)
        at = skip_space(text, at)
        if not text.startswith(VALUE, at):
            raise ValueError(f"the {KEY} {key} of {name} has no {VALUE}")
        begin = at + len(VALUE)
        closed = _VALUE_END.search(text, begin)
        if closed is None:
            raise ValueError(f"the {VALUE} of {key} is never closed by {VALUE_END} with another {KEY} or {CLOSE} behind it")
        if key in arguments:
            raise ValueError(f"the argument {key} of {name} is written twice")
        arguments[key] = typed(text[begin : closed.start()], tools, name, key)
        at = closed.end()
    return ToolCall(name, arguments), at


def _key(text: str, at: int, name: str) -> tuple[str, int]:
    if not text.startswith(KEY, at):
        raise ValueError(f"the call of {name} has {text[at : at + 20]!r} where {KEY} or {CLOSE} is due")
    begin = at + len(KEY)
    end = text.find(KEY_END, begin)
    if end < 0:
        raise ValueError(f"a {KEY} of {name} is never closed by {KEY_END}")
    return as_name(text[begin:end].strip()), end + len(KEY_END)


GLM = Format(
    "glm",
    parse_glm,
    openers=(OPEN,),
    markup=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    exact=True,
    stops=("<|observation|>", "<|user|>"),
    why_not_forced="it writes arguments as bare text, one by one",
)
