"""Parsers of a model's text: tool calls, and the faults of those that are malformed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, cast

from whet.config import resolve_callable
from whet.types import JSON, Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Malformed:
    """A piece of text that tried to be a tool call and is none."""

    text: str
    """Description of the fault, for the model to read."""
    place: int
    """Its place among the reply's calls, readable and malformed ones together, from 0."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply as a message, and what in it tried to be a tool call and is none, in order."""

    message: Message
    malformed: tuple[Malformed, ...] = ()


Parser = Callable[[str], Parsed]
"""Parses the text of a turn, without its stop token. It must not raise, for any text."""


def parse_hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, as Hermes and Qwen models write
    them.

    The message's content is the text around the calls; a call that is never closed ends it.
    """
    calls: list[ToolCall] = []
    malformed: list[Malformed] = []
    content: list[str] = []
    end = 0
    while (start := text.find(OPEN, end)) >= 0:
        content.append(text[end:start])
        close = text.find(CLOSE, start)
        place = len(calls) + len(malformed)
        if close < 0:
            malformed.append(Malformed(f"a {OPEN} is never closed by {CLOSE}", place))
            end = len(text)
            break
        try:
            calls.append(_read_call(text[start + len(OPEN) : close], f"call_{place}"))
        except ValueError as error:
            malformed.append(Malformed(str(error), place))
        end = close + len(CLOSE)
    content.append(text[end:])
    rest = "".join(content)
    if CLOSE in rest:
        malformed.append(Malformed(f"a {CLOSE} has no {OPEN} before it", len(calls) + len(malformed)))
    return Parsed(Message("assistant", rest.strip("\n"), tuple(calls)), tuple(malformed))


def _read_call(text: str, call_id: str) -> ToolCall:
    try:
        call: JSON = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tool call is not valid JSON: {error}") from error
    if not isinstance(call, dict):
        raise ValueError(f"the tool call must be a JSON object with name and arguments, not {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError('the tool call has no "name"')
    if not isinstance(arguments, dict):
        raise ValueError(f'the "arguments" of {name} must be a JSON object, not {type(arguments).__name__}')
    return ToolCall(name, arguments, call_id)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def parse_none(text: str) -> Parsed:
    """The text unchanged, without tool calls."""
    return Parsed(Message("assistant", text))


PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "none": parse_none}


def build_parser(name: str) -> Parser:
    """A built-in parser, or the function that an import reference names.

    Raises:
        ValueError: there is none of that name.
    """
    if name in PARSERS:
        return PARSERS[name]
    if ":" not in name:
        known = ", ".join(repr(parser) for parser in PARSERS)
        raise ValueError(f'there is no parser {name!r}; choose {known} or an import reference "module:function"')
    return cast(Parser, resolve_callable(name, kind="parser", given=["text"]))
