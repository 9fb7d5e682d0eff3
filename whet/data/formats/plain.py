"""No tool calls at all, and calls that a function of the user's reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from whet.config import resolve
from whet.config.reference import check_call
from whet.data.formats.format import Format
from whet.data.parsers import Parsed, Parser, ToolSchemas
from whet.types import Message


def parse_none(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The text unchanged, without tool calls."""
    return Parsed(Message("assistant", text))


NONE = Format("none", parse_none, thinks=False, why_not_forced="it has no calls")


def own_format(reference: str) -> Format:
    """The format that a user's function reads: it is given the turn's text and, if it has a parameter `tools`, the tools' schemas.

    Raises:
        ConfigError: the reference does not resolve, or is no function of a text.
    """
    parse = resolve(reference, kind="parser")
    check_call(parse, reference, kind="parser", given=["text", "tools"] if _takes_tools(parse) else ["text"], options=())
    return format_of(parse, reference)


def format_of(parse: Callable[..., Parsed], name: str = "a function") -> Format:
    """The format that a function `(text)` or `(text, tools)` reads."""
    parser = cast(Parser, parse) if _takes_tools(parse) else lambda text, tools: parse(text)
    return Format(name, parser, openers=None, thinks=False, why_not_forced="a function reads them")


def _takes_tools(parse: object) -> bool:
    return callable(parse) and "tools" in inspect.signature(parse).parameters
