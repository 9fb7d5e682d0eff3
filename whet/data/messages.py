"""From the JSON of OpenAI messages and tool schemas to whet's records, refusing what it cannot carry."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, cast

from whet.data.files import describe_value
from whet.data.strict_json import parse_json
from whet.types import JSON, Message, ToolCall

_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content")


def messages_from(value: JSON, where: str) -> tuple[Message, ...]:
    """The messages of a conversation. `where` starts every error: `file:line: column 'prompt'`.

    Raises:
        ValueError: the list is empty, or a message is not one that OpenAI's chat format knows.
    """
    if not isinstance(value, list):
        raise ValueError(f"{where} holds {describe_value(value)}, expected a list of messages")
    if not value:
        raise ValueError(f"{where} holds an empty list, expected at least one message")
    return tuple(_message(item, f"{where}, message {index}") for index, item in enumerate(value))


def tools_from(value: JSON, where: str) -> tuple[Mapping[str, JSON], ...]:
    """OpenAI tool schemas, from a list or a JSON string of one; none for null.

    Raises:
        ValueError: it is no list of `{"type": "function", "function": {"name": ...}}`.
    """
    value = _from_json_text(value, where)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"{where} holds {describe_value(value)}, expected a list of tool schemas")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise ValueError(f"{where}, tool {index} is {describe_value(tool)}, expected {form}")
    return tuple(value)


def metadata_from(value: JSON, where: str) -> Mapping[str, JSON]:
    """Data about a row besides its label: an object or a JSON string of one; empty for null.

    Raises:
        ValueError: it is neither, or holds values that JSON does not have (a date, bytes).
    """
    value = _from_json_text(value, where)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds {describe_value(value)}, expected an object")
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{where} holds a value that JSON does not have: {error}") from None
    return value


NO_JSON = object()
"""Marker for a value that JSON does not have."""


def as_json(value: Any) -> JSON:
    """A value of a data file as JSON has it: dates as ISO text, numbers without measure as null; `NO_JSON` if it holds something else."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return as_json(float(value))
    if isinstance(value, Mapping):
        mapping = {str(key): as_json(item) for key, item in cast(Mapping[Any, Any], value).items()}
        return NO_JSON if any(item is NO_JSON for item in mapping.values()) else mapping
    if isinstance(value, list | tuple):
        items = [as_json(item) for item in cast(list[Any], value)]
        return NO_JSON if any(item is NO_JSON for item in items) else items
    return NO_JSON


def _from_json_text(value: JSON, where: str) -> JSON:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except json.JSONDecodeError as error:
        shown = describe_value(value)
        raise ValueError(f"{where} holds {shown}, which is not valid JSON: {error.msg} at {error.pos}") from None
    except ValueError as error:
        raise ValueError(f"{where} holds {describe_value(value)}: {error}") from None


def _message(value: JSON, where: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {describe_value(value)}, expected an object with role and content")
    # Parquet gives every message of a column every key, with null where it has none.
    value = {key: item for key, item in value.items() if item is not None}
    if unknown := [key for key in value if key not in _KEYS]:
        raise ValueError(f"{where} has the key {unknown[0]!r}, which is not supported; known are {', '.join(_KEYS)}")
    for key in ("role", "name", "tool_call_id", "reasoning_content"):
        if not isinstance(value.get(key, ""), str):
            raise ValueError(f"{where}: {key} is {describe_value(value[key])}, expected text")
    if not value.get("role"):
        raise ValueError(f"{where} has no role")
    calls = value.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls is {describe_value(calls)}, expected a list")
    if "content" not in value and not calls:
        raise ValueError(f"{where} has no content")
    return Message(
        role=value["role"],
        content=_content(value.get("content", ""), where),
        tool_calls=tuple(_tool_call(call, f"{where}, tool call {index}") for index, call in enumerate(calls)),
        name=value.get("name"),
        tool_call_id=value.get("tool_call_id"),
        reasoning_content=value.get("reasoning_content"),
    )


def _content(value: JSON, where: str) -> str:
    """Text, or OpenAI's list of parts joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: content is {describe_value(value)}, expected text or a list of text parts")
    return "".join(_part(part, where) for part in value)


def _part(part: JSON, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"{where} has a part of type {kind!r}: media is not supported yet, only text parts are")
    if kind is None or not isinstance(part.get("text"), str):
        form = '{"type": "text", "text": ...}'
        raise ValueError(f"{where} has the part {describe_value(part)}, expected {form}")
    return part["text"]


def _tool_call(value: JSON, where: str) -> ToolCall:
    """A tool call, in OpenAI's form or flat, with name and arguments as siblings."""
    flat = isinstance(value, dict) and value.get("function") is None and value.get("arguments") is not None
    function = value.get("function") if isinstance(value, dict) and not flat else value
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        form = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        raise ValueError(f"{where} is {describe_value(value)}, expected {form}")
    given = function.get("arguments")
    arguments = _from_json_text(given, f"{where}: arguments")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments are {describe_value(arguments)}, expected an object")
    return ToolCall(function["name"], arguments, value.get("id") or "", given if isinstance(given, str) else None)
