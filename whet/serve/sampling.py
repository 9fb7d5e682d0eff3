"""From the fields of a request to the engine's sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from whet.serve.errors import ApiError
from whet.types import SamplingParams

NO_LIMIT = 1 << 30
"""A top_k from here on means none, as -1 does."""
GREEDY = 1e-6
"""Temperatures below it mean the most likely token."""


def sampling_of(names: Mapping[str, str], **values: Any) -> SamplingParams:
    """The engine's parameters, with seed 0. A value of None is the engine's default.

    Args:
        names: what the request calls a parameter, where that is another name.
        values: by the names of `SamplingParams`.

    Raises:
        ApiError: 400, naming the field, for a value that is out of range.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if 0 <= given.get("temperature", 1.0) < GREEDY:
        given["temperature"] = 0.0
    if given.get("top_k") == -1 or given.get("top_k", 0) >= NO_LIMIT:
        given["top_k"] = 0
    try:
        return SamplingParams(**given)
    except ValueError as error:
        name = next((name for name in given if str(error).startswith(f"{name} ")), None)
        called = None if name is None else names.get(name, name)
        text = str(error) if name is None or called is None else str(error).replace(name, called, 1)
        raise ApiError(400, text, param=called) from None


def stop_texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """One text, several or none."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def biases(value: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """OpenAI's logit_bias: token ids as text.

    Raises:
        ApiError: 400 if a key is no token id.
    """
    for text in value or ():
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise ApiError(400, f"logit_bias has the key {text[:40]!r}, expected token ids", param="logit_bias")
    return tuple((int(text), bias) for text, bias in (value or {}).items())


def new_seed() -> int:
    """For a request that names none."""
    return secrets.randbits(63)
