"""JSON by the letter of RFC 8259, where Python's reader would let through what means something else elsewhere, or nothing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from whet.types import JSON

MAX_DIGITS = 4300
"""Number of digits of an integer; Python refuses to read longer ones, since that takes quadratic time."""
MAX_LEVELS = 200
"""Depth of nested lists and objects. Code that walks the value afterwards can recurse this deep within
Python's stack."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str) -> JSON:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON.
        ValueError: it holds NaN, an infinity, a number that no float or integer here can hold, the same key twice in
            one object, half of a surrogate pair, or more levels than can be read.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=_integer, object_pairs_hook=_object
        )
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > MAX_LEVELS:
        _check_levels(value)
    if _HALF_PAIR.search(text):
        _check_text(value)
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value; write null, or the row without it")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large for a float; write it as text")
    return number


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the integer {text[:20]}... has {len(text)} digits, over the limit of {MAX_DIGITS}; write it as text")
    return int(text)


def _object(pairs: Sequence[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = next(key for key, count in times.items() if count > 1)
        raise ValueError(f"the key {twice[:200]!r} occurs {times[twice]} times in one object; keep the one that is meant")
    return found


def _too_deep() -> ValueError:
    return ValueError(f"its lists and objects are nested too deeply to be read: over {MAX_LEVELS} levels")


def _check_levels(value: JSON) -> None:
    """Check the nesting, level by level, so that each value is visited once."""
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [inner for each in level if isinstance(each, list | dict) for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return
    raise _too_deep()


def _check_text(value: JSON) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise ValueError(f"{half} is half of a surrogate pair, which is no character; was a text cut inside an emoji?") from None
