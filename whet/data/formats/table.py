"""The formats of tool calls by name, and the one that a chat template tells of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from whet.data.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from whet.data.formats.dsml import DSML
from whet.data.formats.format import Format
from whet.data.formats.glm import GLM
from whet.data.formats.harmony import HARMONY
from whet.data.formats.hermes import HERMES
from whet.data.formats.kimi import KIMI
from whet.data.formats.llama3 import LLAMA3
from whet.data.formats.plain import NONE, format_of, own_format
from whet.data.formats.qwen_xml import QWEN_XML
from whet.data.formats.tags import TAGS
from whet.data.parsers import Parsed

AUTO = "auto"
FORMATS: Mapping[str, Format] = {
    chosen.name: chosen
    for chosen in (HERMES, QWEN_XML, LLAMA3, DEEPSEEK_V3, DEEPSEEK_V31, DSML, GLM, KIMI, HARMONY, TAGS, NONE)
}
SIGNS: tuple[tuple[tuple[str, ...], Format], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("｜DSML｜",), DSML),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<arg_key>",), GLM),
    (("<function=", "<parameter="), QWEN_XML),
    (("<tool_call>", "arguments"), HERMES),
    (("<|python_tag|>",), LLAMA3),
    (("<|start_header_id|>", "parameters"), LLAMA3),
)
"""Texts that a chat template must all have, and the format that it tells of then; the first that fits counts."""
OTHERS = (
    "[TOOL_CALLS]",
    "<|tool_call_start|>",
    "<|tool_call>",
    "<minimax:tool_call>",
    "<|START_ACTION|>",
    "<atem:function_calls>",
    "functools[",
    "<tool_sep>",
)
"""Texts of chat templates whose calls no format here reads."""


AnyParser = str | Format | Callable[..., Parsed]
"""A format of tool calls: what settings call it, itself, or a function of a text."""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A format, and why it was taken."""

    format: Format
    why: str
    """In words, for a line of the start and of `whet check`."""
    fault: str = ""
    """Reason why calls cannot be read; empty: they can."""


def build_format(name: str) -> Format:
    """A built-in format, or that of the function which an import reference names.

    Raises:
        ValueError: there is none of that name.
    """
    if name in FORMATS:
        return FORMATS[name]
    if ":" not in name:
        known = ", ".join(repr(each) for each in (AUTO, *FORMATS))
        raise ValueError(f'there is no parser {name!r}; choose {known} or an import reference "module:function"')
    return own_format(name)


def choose_format(parser: AnyParser, template: str) -> FormatChoice:
    """The format that settings name, or, with `auto`, that a chat template tells of.

    Raises:
        ValueError: there is none of that name.
    """
    if parser == AUTO:
        return format_of_template(template)
    if isinstance(parser, Format):
        return FormatChoice(parser, "as set")
    return FormatChoice(build_format(parser) if isinstance(parser, str) else format_of(parser), "as set")


def format_of_template(template: str) -> FormatChoice:
    """The format of which a chat template tells.

    A template that does not speak of calls leaves the model to what the prompts say: `hermes`, which most models write.
    """
    for texts, chosen in SIGNS:
        if all(text in template for text in texts):
            return FormatChoice(chosen, f"the chat template has {texts[0]}")
    other = next((text for text in OTHERS if text in template), None)
    if other is not None:
        fault = (
            f"the chat template writes tool calls with {other}, which no built-in parser reads: name a function that does "
            '(env.parser="module:function"; docs/tool_formats.md), or set env.parser=none if no calls are to be read'
        )
        return FormatChoice(NONE, f"no built-in parser reads {other} of the chat template", fault)
    if not template:
        return FormatChoice(HERMES, "there is no chat template to tell")
    return FormatChoice(HERMES, "the chat template tells of no format")
