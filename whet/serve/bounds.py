"""Bounds on requests: counts and sizes of fields, and the depth of the JSON. Anything beyond is
answered 400."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from whet.serve.errors import ApiError
from whet.types import JSON
from whet.types.columns import Ints

MAX_DEPTH = 100
"""Lists and objects inside each other."""
MAX_CONTAINERS = 100_000
"""Lists and objects of a body."""
MAX_VALUES = 4 * 1024**2
"""Values of a body."""
MAX_KEYS = 10_000
"""Keys of one object, at most: each unknown key is an error of its own, before the first is reported."""
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 256
MAX_TOLD = 4 * 1024**2
"""Log-probs that an answer may tell: samples times tokens times alternatives."""
CHARACTERS_EACH = 64
"""Characters of a prompt for each token that the engine can hold: no text with more has so few tokens."""

_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON text; one without an end goes to the end, so that nothing is looked at twice."""

Name = Annotated[str, Field(max_length=1024)]
"""A name, an id or a label."""
FilePath = Annotated[str, Field(max_length=4096)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Stops = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Ids = Annotated[list[int], Field(fail_fast=True)]
"""Token ids, any number; checking stops at the first value that is none."""
IdLists = Annotated[list[Ids], Field(fail_fast=True)]
TokenIds = Annotated[Ids, Field(max_length=4096)]
"""Ids of stop tokens."""
Biases = Annotated[dict[Annotated[str, Field(max_length=16)], float], Field(max_length=4096)]
GrammarText = Annotated[str, Field(max_length=128 * 1024)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Count = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
"""A number of tokens, samples or alternatives."""
Positive = Annotated[int, Field(ge=1, lt=1 << 31)]
MAX_MESSAGES, MAX_TOOLS, MAX_PROMPTS = 16_384, 512, 4096


def check_size(raw: bytes) -> None:
    """Refuse a body that would take long to read, before it is.

    Raises:
        ApiError: 400, naming the limit.
    """
    for what, marks, most in (("lists and objects", b"[{", MAX_CONTAINERS), ("values", b",", MAX_VALUES)):
        if _count(raw, marks) > most and _has_more_outside_texts(raw, marks, most):
            raise ApiError(400, f"the body has over {most} {what}, which is the limit", code="body_too_complex")


def _count(raw: bytes, marks: bytes) -> int:
    return sum(raw.count(mark) for mark in marks)


def _has_more_outside_texts(raw: bytes, marks: bytes, most: int) -> bool:
    """Text by text, so that other threads have their turn."""
    found = start = 0
    for text in _TEXT.finditer(raw):
        found += _count(raw[start : text.start()], marks)
        start = text.end()
        if found > most:
            return True
    return found + _count(raw[start:], marks) > most


def check_shape(value: JSON) -> None:
    """Check the depth of a JSON value, and the number of keys of its objects.

    Raises:
        ApiError: 400, with the name of the field that is over a limit.
    """
    _check_keys("the body", [value])
    for name, item in value.items() if isinstance(value, dict) else [("", value)]:
        level, depth = [item], 1
        _check_keys(name, level)
        while level := [inner for each in level if isinstance(each, dict | list) for inner in _inside(each)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise ApiError(400, f"{name}: lists and objects are nested deeper than {MAX_DEPTH} levels", param=name)
            _check_keys(name, level)


def _check_keys(name: str, values: list[JSON]) -> None:
    if (most := max((len(each) for each in values if isinstance(each, dict)), default=0)) > MAX_KEYS:
        raise ApiError(400, f"{name}: an object has {most} keys, over the limit of {MAX_KEYS}", param=name)


def _inside(value: JSON) -> list[JSON]:
    """The lists and objects directly in one."""
    return [inner for inner in (value.values() if isinstance(value, dict) else value) if isinstance(inner, dict | list)]


def check_blocks(messages: Sequence[JSON], param: str) -> None:
    """Refuse a conversation in more pieces than there may be messages: messages or items, their blocks, and the blocks in those.

    Raises:
        ApiError: 400, naming the limit.
    """
    num, level = 0, list(messages)
    for _ in range(3):
        num += len(level)
        level = [block for each in level if isinstance(each, dict) for part in each.values() if isinstance(part, list) for block in part]
    if num > MAX_MESSAGES:
        raise ApiError(400, f"{param} has {num} messages and blocks, over the limit of {MAX_MESSAGES}", param=param)


def check_alternatives(tokens: int, each: int, param: str) -> None:
    """Refuse an answer with too many log-probs.

    Args:
        tokens: tokens of all samples, prompts included if they are scored.
        each: alternatives reported for each.
        param: the field that asks for them.

    Raises:
        ApiError: 400 if there are more than one answer may have.
    """
    if tokens * each > MAX_TOLD:
        message = f"{param}: {tokens} tokens with {each} alternatives each are over the limit of {MAX_TOLD} log-probs"
        raise ApiError(400, message, param=param)


def texts_in(value: JSON, *, keys: bool) -> Iterator[str]:
    """All texts in a JSON value, with the keys of objects or without."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left.extend(each.values())
            if keys:
                yield from each
        elif isinstance(each, list | tuple):
            left.extend(each)


def num_characters(value: JSON, *, keys: bool = False) -> int:
    """Characters of all texts in a JSON value."""
    return sum(map(len, texts_in(value, keys=keys)))


def context_of(ids: Sequence[int]) -> Ints:
    """Token ids as an engine takes them.

    Raises:
        ApiError: 400, if one is larger than any vocabulary.
    """
    try:
        return Ints.of(ids)
    except ValueError as error:
        raise ApiError(400, f"token ids are of 32 bits, and there is {max(ids, key=abs)}") from error
