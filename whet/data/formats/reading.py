"""Parts that the parsers of all formats share: the reply as it is read, JSON, thinking, values by their schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, cast

from whet.data.parsers import Malformed, Parsed, ToolSchemas
from whet.types import JSON, Message, ToolCall

MAX_ATTEMPTS = 256
"""Calls of one reply, malformed ones included, that are read; what follows is one more malformed call. It bounds the time that a hostile
text takes."""
THINK, THINK_END = "<think>", "</think>"
_SPACE = re.compile(r"\s*")
_MAX_REFS = 16


class TooManyCalls(Exception):
    """A reply has more calls than are read."""


class ReplyParts:
    """A reply while it is read: its words, its calls, and what tried to be a call."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._calls: list[ToolCall] = []
        self._malformed: list[Malformed] = []

    @property
    def place(self) -> int:
        """Place of the next call, malformed ones counted."""
        return len(self._calls) + len(self._malformed)

    def say(self, text: str) -> None:
        """Text that is no call."""
        self._words.append(text)

    def call(self, name: str, arguments: Mapping[str, JSON], call_id: str = "") -> None:
        """A call that could be read; without an id of its own it is named by its place.

        Raises:
            TooManyCalls: there are too many.
        """
        self._check_number()
        self._calls.append(ToolCall(name, arguments, call_id or f"call_{self.place}"))

    def fault(self, text: str) -> None:
        """A call that could not be read, and why.

        Raises:
            TooManyCalls: there are too many.
        """
        self._check_number()
        self._malformed.append(Malformed(text, self.place))

    def _check_number(self) -> None:
        if self.place >= MAX_ATTEMPTS:
            self._malformed.append(Malformed(f"more than {MAX_ATTEMPTS} tool calls in one reply; the others were not read", self.place))
            raise TooManyCalls

    def parsed(self, thinking: str | None = None) -> Parsed:
        """The message and the faults so far, with the thinking that was kept apart."""
        words = "".join(self._words).strip("\n")
        return Parsed(Message("assistant", words, tuple(self._calls), reasoning_content=thinking), tuple(self._malformed))


def outside_thinking(text: str, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
    """The next match of a pattern that does not lie between `<think>` and `</think>`.

    Args:
        pattern: it also finds `<think>`.
        at: the place to look from, outside thinking.
    """
    while (found := pattern.search(text, at)) is not None:
        if found[0] != THINK:
            return found
        end = text.find(THINK_END, found.end())
        if end < 0:
            return None
        at = end + len(THINK_END)
    return None


def markup_pattern(*texts: str) -> re.Pattern[str]:
    """A pattern for `outside_thinking` that finds these texts."""
    return re.compile("|".join(map(re.escape, (THINK, *texts))))


def skip_space(text: str, at: int) -> int:
    """The place of the next character that is no space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def read_json(text: str, at: int) -> tuple[JSON, int]:
    """The JSON value that begins at a place, and the place behind it.

    Raises:
        ValueError: there is none, with the reason.
    """
    at = skip_space(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise ValueError(f"the tool call is not valid JSON: {error.msg} at character {error.pos - at} of it") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tool call is not valid JSON: {error}") from None


def read_arguments(text: str, at: int, name: str) -> tuple[dict[str, JSON], int]:
    """The JSON object of a call's arguments that begins at a place, and the place behind it.

    Raises:
        ValueError: there is none, with the reason.
    """
    value, end = read_json(text, at)
    return as_arguments(value, name), end


def as_arguments(value: JSON, name: str) -> dict[str, JSON]:
    """A call's arguments.

    Raises:
        ValueError: they are no object.
    """
    if not isinstance(value, dict):
        raise ValueError(f'the "arguments" of {name} must be a JSON object, not {type(value).__name__}')
    return value


def as_name(value: JSON) -> str:
    """A call's name.

    Raises:
        ValueError: it is no text, or empty.
    """
    if not isinstance(value, str) or not value:
        raise ValueError('the tool call has no "name"')
    return value


def function_of(tools: ToolSchemas, name: str) -> Mapping[str, Any]:
    """The schema of the tool of this name; empty: there is none."""
    return next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})


def parameters_of(tools: ToolSchemas, name: str) -> Mapping[str, Any]:
    """The JSON schema of the arguments of the tool of this name; empty: it is not known."""
    parameters = function_of(tools, name).get("parameters")
    return cast("Mapping[str, Any]", parameters) if isinstance(parameters, Mapping) else {}


def single_parameter(tools: ToolSchemas, name: str) -> str | None:
    """Name of the one argument that a tool needs: the required one if only one is, or the first one if none is. None: it needs several."""
    schema = parameters_of(tools, name)
    required, properties = schema.get("required"), schema.get("properties")
    needed: list[str] = list(required) if isinstance(required, list | tuple) else []
    known: list[str] = list(cast("Mapping[str, Any]", properties)) if isinstance(properties, Mapping) else []
    if len(needed) > 1:
        return None
    return needed[0] if needed else next(iter(known), "text")


def typed(text: str, tools: ToolSchemas, name: str, key: str) -> JSON:
    """The value of an argument that was written as bare text, as the tool's schema has it.

    A string stays the text; a number, true, false, null, a list or an object is read as JSON (`True` and `None` as Python has them, too).
    What the schema does not say is read as JSON where it is such, and else is text. What cannot be read as the schema wants stays text,
    which the tool refuses.
    """
    properties = parameters_of(tools, name).get("properties")
    schema = cast("Mapping[str, Any]", properties).get(key) if isinstance(properties, Mapping) else None
    kinds = set(_kinds(schema, parameters_of(tools, name), _MAX_REFS)) if isinstance(schema, Mapping) else set[str]()
    if kinds == {"string"}:
        return text
    bare = text.strip()
    spelled = {"True": True, "False": False, "None": None}
    if bare in spelled:
        value: JSON = spelled[bare]
    else:
        try:
            value, end = read_json(bare, 0)
        except ValueError:
            return text
        if end != len(bare):
            return text
    return value if _fits(value, kinds) else text


def _fits(value: JSON, kinds: set[str]) -> bool:
    """True if a value is of one of the kinds; without kinds, if it is no text."""
    if isinstance(value, str):
        return False
    kind = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}.get(type(value), "null")
    return not kinds or kind in kinds or (kind == "integer" and "number" in kinds) or (kind == "number" and "integer" in kinds)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The types of JSON that a schema admits, as far as it says."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    schema = cast("Mapping[str, Any]", schema)
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list | tuple):
        yield from (each for each in cast("list[Any]", kind) if isinstance(each, str))
    for key in ("anyOf", "oneOf", "allOf"):
        some = schema.get(key)
        for each in cast("list[Any]", some) if isinstance(some, list | tuple) else []:
            yield from _kinds(each, root, depth - 1)
    if "type" not in schema:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        yield from (_kind_of(value) for value in (cast("list[Any]", values) if isinstance(values, list | tuple) else []))
    place = schema.get("$ref")
    if isinstance(place, str):
        yield from _kinds(_at(root, place), root, depth - 1)


def _kind_of(value: JSON) -> str:
    return {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", str: "string"}.get(type(value), "null")


def _at(root: Mapping[str, Any], place: str) -> Any:
    """The part of a schema that `#/$defs/name` names; None: there is none."""
    part: Any = root
    for key in place.removeprefix("#/").split("/"):
        part = cast("Mapping[str, Any]", part).get(key) if isinstance(part, Mapping) else None
    return part


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no number of JSON's")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
