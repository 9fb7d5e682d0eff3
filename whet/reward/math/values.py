"""Values of formulas, found in arithmetic of bounded size: two formulas are equal if they agree to hundreds of digits at chosen points.

A tree (`whet.reward.math.arithmetic`) of n nodes costs n operations at each point, each on numbers of at most `MAX_BITS` bits. Nothing is
expanded, simplified or searched, so no formula takes long: what grows beyond the bounds is `Refused`. Numbers without a letter and without
a root or function are compared exactly.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mpmath import mp, mpf

from whet.reward.math.arithmetic import Tree, parts_of, symbols_of
from whet.reward.math.evaluation import ROUNDING_BITS, Evaluation, Undefined, evaluate
from whet.reward.math.grammar import Refused
from whet.types import JSON

ZERO = "whet.reward.math.values:difference_is_zero"

BITS = 400
"""Precision of the first attempt, in bits."""
MAX_BITS = 4096
"""Precision of the second attempt, in bits, for formulas whose parts differ much in size; formulas that
need more are refused."""
GUARD_BITS = 300
"""Beyond what the parts of a formula differ in size."""
MAX_EXACT_BITS = 20_000
"""Size limit of the numerator and denominator of an exact number, in bits."""
POSITIVE_POINTS, SIGNED_POINTS = 3, 4


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a tree at a point, and how far it can be trusted."""

    number: Any
    bits: int
    """With which it was found."""
    error: Any
    left_reals: bool = False


def difference_is_zero(first: JSON, second: JSON) -> bool:
    """True if two trees are equal for all values of their symbols."""
    try:
        return equal_trees(first, second)
    except Refused:
        return False


def close_enough(first: JSON, second: JSON, tolerance: float) -> bool:
    """True if two trees are equal for all values of their symbols, or are numbers within a relative
    tolerance."""
    try:
        if equal_trees(first, second):
            return True
        if symbols_of(first) | symbols_of(second):
            return False
        return agree([_both_at(first, second, {})], tolerance=tolerance)
    except Refused:
        return False


def equal_trees(first: Tree, second: Tree) -> bool:
    """True if two trees have the same value wherever both have one. Raises Refused if that cannot be
    computed within bounds."""
    if first == second:
        return not _has(first, "oo")
    exact = exact_value(first), exact_value(second)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    return agree([_both_at(first, second, point) for point in points(symbols_of(first) | symbols_of(second))])


def _both_at(first: Tree, second: Tree, point: Mapping[str, Fraction]) -> tuple[Value | None, Value | None]:
    """The values of two trees at a point, found with the same number of bits."""
    one, other = values_at(first, point), values_at(second, point)
    if one is not None and other is not None and one.bits != other.bits:
        bits = max(one.bits, other.bits)
        return values_at(first, point, bits), values_at(second, point, bits)
    return one, other


def agree(pairs: Sequence[tuple[Value | None, Value | None]], *, tolerance: float = 0.0) -> bool:
    """True if values agree at every point where both exist, and there is such a point. A point at which
    both left the reals decides nothing."""
    compared = 0
    for one, other in pairs:
        if one is None or other is None:
            continue
        same = close(one, other, tolerance)
        if not same and not (one.left_reals and other.left_reals and len(pairs) > 1):
            return False
        compared += same
    return compared > 0


def close(one: Value, other: Value, tolerance: float = 0.0) -> bool:
    """True if two values are the same number, as far as their precision goes, or within a relative
    tolerance."""
    with mp.workprec(MAX_BITS):
        apart = abs(one.number - other.number)
        return bool(apart <= max(one.error, other.error) or apart <= tolerance * max(abs(one.number), abs(other.number)))


@functools.lru_cache(maxsize=256)
def _points(symbols: tuple[str, ...]) -> tuple[dict[str, Fraction], ...]:
    if not symbols:
        return ({},)
    return tuple(
        {name: _coordinate(name, k, signed=k >= POSITIVE_POINTS) for name in symbols} for k in range(POSITIVE_POINTS + SIGNED_POINTS)
    )


def points(symbols: set[str]) -> tuple[dict[str, Fraction], ...]:
    """The points at which formulas of these symbols are compared: first all positive, then of either sign."""
    return _points(tuple(sorted(symbols)))


def _coordinate(name: str, k: int, *, signed: bool) -> Fraction:
    digest = hashlib.sha256(f"{k}/{name}".encode()).digest()
    size = Fraction(int.from_bytes(digest[:8], "big"), 2**64) * 2 + Fraction(1, 3)
    return -size if signed and digest[8] & 1 else size


def values_at(tree: Tree, point: Mapping[str, Fraction], bits: int = BITS) -> Value | None:
    """Value of a tree at a point, with at least `bits` bits; None if it has none. Raises Refused beyond
    the bounds."""
    number, run = _evaluated(tree, point, bits)
    if run.spread + GUARD_BITS > bits:
        bits = run.spread + GUARD_BITS
        if bits > MAX_BITS:
            raise Refused("its parts differ too much in size to be computed")
        number, run = _evaluated(tree, point, bits)
    if number is None:
        return None
    return Value(number, bits, mpf(2) ** (run.largest - bits + ROUNDING_BITS), run.left_reals and not _has(tree, "i"))


def _evaluated(tree: Tree, point: Mapping[str, Fraction], bits: int) -> tuple[Any, Evaluation]:
    run = Evaluation(point, bits)
    try:
        with mp.workprec(bits):
            return evaluate(tree, run), run
    except Undefined:
        return None, run


def _has(tree: Tree, kind: str) -> bool:
    return tree[0] == kind or any(_has(part, kind) for part in parts_of(tree))


def exact_value(tree: Tree) -> Fraction | None:
    """The value of a tree of numbers, + - * / and whole powers; None for any other, and where it has none. Raises Refused beyond bounds."""
    kind, parts = tree[0], parts_of(tree)
    if kind == "number":
        return Fraction(tree[1])
    if kind not in ("+", "-", "*", "/", "^"):
        return None
    one, other = (exact_value(part) for part in parts)
    if one is None or other is None:
        return None
    if kind == "^":
        return _exact_power(one, other)
    if kind == "/" and not other:
        return None
    return _bounded({"+": one + other, "-": one - other, "*": one * other}[kind] if kind != "/" else one / other)


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or (not base and exponent <= 0):
        return None
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_EXACT_BITS:
        raise Refused("a power is too large to be computed")
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_EXACT_BITS:
        raise Refused("its numbers are too large to be computed")
    return value
