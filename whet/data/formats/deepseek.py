"""DeepSeek-V3 and R1, and V3.1 to V3.2-Exp: calls between tokens of their own.

V3: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line break and the arguments as JSON in a fenced block, `<｜tool▁call▁end｜>`.
V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. Both are between `<｜tool▁calls▁begin｜>` and
`<｜tool▁calls▁end｜>`, and both models go on behind a tool's answer without a new opening of their turn.
"""

from __future__ import annotations

import re

from whet.data.formats.blocks import CallBlocks
from whet.data.formats.format import Forced, Format
from whet.data.formats.reading import as_name, read_arguments
from whet.data.parsers import Parsed, ToolSchemas
from whet.types import ToolCall

SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEP, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"
_BLOCKS = CallBlocks(OPEN, CLOSE, sections=(SECTION,), section_ends=(SECTION_END,))
_FENCE = re.compile(r"\s*```(?:json)?\s*")
_FENCE_END = re.compile(r"\s*```")


def parse_deepseek_v3(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply as DeepSeek-V3 writes them, and the text around them."""
    return _BLOCKS.parse(text, _read_fenced)


def parse_deepseek_v31(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply as DeepSeek-V3.1 writes them, and the text around them."""
    return _BLOCKS.parse(text, _read_bare)


def _read_bare(text: str, at: int) -> tuple[ToolCall, int]:
    sep = _find_sep(text, at)
    name = as_name(text[at:sep].strip())
    arguments, at = read_arguments(text, sep + len(SEP), name)
    return ToolCall(name, arguments), at


def _read_fenced(text: str, at: int) -> tuple[ToolCall, int]:
    begin = _find_sep(text, at) + len(SEP)
    end = text.find("\n", begin)
    name = as_name(text[begin : end if end >= 0 else len(text)].strip())
    fence = None if end < 0 else _FENCE.match(text, end)
    if fence is None:
        raise ValueError(f"the arguments of {name[:80]} must be between ```json and ```, on lines of their own")
    arguments, at = read_arguments(text, fence.end(), name)
    closed = _FENCE_END.match(text, at)
    if closed is None:
        raise ValueError(f"the arguments of {name} are not closed by ```")
    return ToolCall(name, arguments), closed.end()


def _find_sep(text: str, at: int) -> int:
    sep = text.find(SEP, at)
    if sep < 0:
        raise ValueError(f"the tool call has no {SEP}")
    return sep


_TOKENS = (SECTION, SECTION_END, OPEN, SEP, CLOSE)
DEEPSEEK_V3 = Format(
    "deepseek_v3",
    parse_deepseek_v3,
    openers=(SECTION, OPEN),
    markup=_TOKENS,
    exact=True,
    forced=Forced(SECTION, lambda name: f"{OPEN}function{SEP}{name}{FENCE}", f"{FENCE_END}{CLOSE}", "\n", SECTION_END, bare=True),
)
DEEPSEEK_V31 = Format(
    "deepseek_v31",
    parse_deepseek_v31,
    openers=(SECTION, OPEN),
    markup=_TOKENS,
    exact=True,
    forced=Forced(SECTION, lambda name: f"{OPEN}{name}{SEP}", CLOSE, "", SECTION_END, bare=True),
)
