"""What a model's text says: tool calls, and what is wrong with those that are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from whet.types import Message, ToolCall

ParserName = Literal["hermes", "none"]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply as a message, and one explanation for each piece that tried to be a tool call and is none."""

    message: Message
    malformed: tuple[str, ...] = ()


Parser = Callable[[str], Parsed]

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, as Hermes and Qwen models write them.

    The message's content is the text around the calls.
    """
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for i, match in enumerate(_CALL.finditer(text)):
        try:
            calls.append(_read_call(match.group(1), f"call_{i}"))
        except ValueError as error:
            malformed.append(str(error))
    rest = _CALL.sub("", text)
    if "<tool_call>" in rest:
        malformed.append("a <tool_call> is never closed by </tool_call>")
        rest = rest.split("<tool_call>", 1)[0]
    elif "</tool_call>" in rest:
        malformed.append("a </tool_call> has no <tool_call> before it")
    return Parsed(Message("assistant", rest.strip("\n"), tuple(calls)), tuple(malformed))


def _read_call(text: str, call_id: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the tool call is not valid JSON: {error}") from error
    if not isinstance(call, dict):
        raise ValueError(f"the tool call must be a JSON object with name and arguments, not {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str):
        raise ValueError('the tool call has no "name"')
    if not isinstance(arguments, dict):
        raise ValueError(f'the "arguments" of {name} must be a JSON object, not {type(arguments).__name__}')
    return ToolCall(name, arguments, call_id)


def parse_none(text: str) -> Parsed:
    """The text as it stands."""
    return Parsed(Message("assistant", text))


PARSERS: dict[ParserName, Parser] = {"hermes": parse_hermes, "none": parse_none}
