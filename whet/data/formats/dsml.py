"""DeepSeek-V4, and V3.2: calls in DSML, with the type of each argument next to it.

`<｜DSML｜tool_calls><｜DSML｜invoke name="x"><｜DSML｜parameter name="k" string="true">text</｜DSML｜parameter>...</｜DSML｜invoke>...
</｜DSML｜tool_calls>`; V3.2 names the section `function_calls`. A value with `string="false"` is JSON.
"""

from __future__ import annotations

import re

from whet.data.formats.blocks import CallBlocks
from whet.data.formats.format import Format
from whet.data.formats.reading import as_name, read_json, skip_space, typed
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import JSON, ToolCall

MARK = "｜DSML｜"
SECTIONS = (f"<{MARK}tool_calls>", f"<{MARK}function_calls>")
SECTION_ENDS = (f"</{MARK}tool_calls>", f"</{MARK}function_calls>")
INVOKE, INVOKE_END = f"<{MARK}invoke", f"</{MARK}invoke>"
PARAMETER, PARAMETER_END = f"<{MARK}parameter", f"</{MARK}parameter>"
_BLOCKS = CallBlocks(INVOKE, INVOKE_END, sections=SECTIONS, section_ends=SECTION_ENDS)
_INVOKE = re.compile(r'\s{1,16}name="([^"\n]{1,256})"\s{0,16}>')
_PARAMETER = re.compile(re.escape(PARAMETER) + r'\s{1,16}name="([^"\n]{1,256})"(?:\s{1,16}string="(true|false)")?\s{0,16}>')
_VALUE_END = re.compile(rf"{re.escape(PARAMETER_END)}(?=\s*(?:{re.escape(PARAMETER)}|{re.escape(INVOKE_END)}))")


def parse_dsml(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply and the text around them."""
    return _BLOCKS.parse(text, lambda text, at: _read_call(text, at, tools))


def _read_call(text: str, at: int, tools: ToolSchemas) -> tuple[ToolCall, int]:
    head = _INVOKE.match(text, at)
    if head is None:
        raise ValueError(f'a {INVOKE}> must have name="..."')
    name, at = as_name(head[1].strip()), head.end()
    arguments: dict[str, JSON] = {}
    while not text.startswith(INVOKE_END, at := skip_space(text, at)):
        tag = _PARAMETER.match(text, at)
        if tag is None:
            raise ValueError(f'the call of {name} has {text[at : at + 20]!r} where {PARAMETER} name="..."> or {INVOKE_END} is due')
        end = _VALUE_END.search(text, tag.end())
        if end is None:
            raise ValueError(f"the parameter {tag[1]} of {name} is never closed by {PARAMETER_END}")
        if tag[1] in arguments:
            raise ValueError(f"the parameter {tag[1]} of {name} is written twice")
        arguments[tag[1]] = _value(text[tag.end() : end.start()], tag[2], tools, name, tag[1])
        at = end.end()
    return ToolCall(name, arguments), at


def _value(text: str, is_text: str | None, tools: ToolSchemas, name: str, key: str) -> JSON:
    if is_text == "true":
        return text
    if is_text is None:
        return typed(text, tools, name, key)
    value, end = read_json(text, 0)
    if skip_space(text, end) != len(text):
        raise ValueError(f'the parameter {key} of {name} has string="false", and is not one JSON value')
    return value


DSML = Format(
    "dsml",
    parse_dsml,
    openers=(*SECTIONS, INVOKE),
    markup=(MARK,),
    exact=True,
    why_not_forced="it writes arguments one by one",
)
