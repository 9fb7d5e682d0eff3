"""Operations of formulas on numbers of bounded size, at one point: what a tree of `whet.reward.math.arithmetic` is worth there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mpmath import mp, mpc, mpf

from whet.reward.math.arithmetic import Tree, parts_of
from whet.reward.math.grammar import Refused

ROUNDING_BITS = 60
"""Guard bits: a number smaller than the rest by the precision less these bits is a rounding error."""
MAX_MAGNITUDE = 20_000
"""Binary order of the largest number, and of the smallest."""
MAX_GAMMA = 2000
"""Largest argument of a factorial or binomial coefficient."""


class Undefined(ArithmeticError):
    """A formula has no value at a point: a division by zero, the logarithm of zero."""


@dataclass(slots=True)
class Evaluation:
    """One evaluation of a tree at one point."""

    point: Mapping[str, Fraction]
    bits: int
    left_reals: bool = False
    """A root, a logarithm or a power of a negative number was taken."""
    smallest: int = 0
    largest: int = 0
    """Binary orders of magnitude of what was met, 0 included."""

    @property
    def spread(self) -> int:
        return self.largest - self.smallest

    def note(self, value: Any) -> Any:
        if not value:
            return value
        magnitude = int(mp.mag(value))
        if abs(magnitude) > MAX_MAGNITUDE:
            raise Refused("its values are too large or too small to be computed")
        self.smallest, self.largest = min(self.smallest, magnitude), max(self.largest, magnitude)
        return value


def evaluate(tree: Tree, run: Evaluation) -> Any:
    """The value of a tree at the run's point, as a number of mpmath. Raises Undefined where it has none, Refused beyond the bounds."""
    kind = tree[0]
    if kind == "number":
        value = Fraction(tree[1])
        return run.note(mpf(value.numerator) / value.denominator)
    if kind == "symbol":
        value = run.point[tree[1]]
        return mpf(value.numerator) / value.denominator
    if kind == "oo":
        raise Undefined("infinity is no number")
    if kind in _CONSTANTS:
        return _CONSTANTS[kind]()
    return run.note(_OPERATIONS[kind](run, *(evaluate(part, run) for part in parts_of(tree))))


def _add(run: Evaluation, one: Any, other: Any) -> Any:
    total = one + other
    if total and mp.mag(total) < max(mp.mag(one) if one else 0, mp.mag(other) if other else 0) - run.bits + ROUNDING_BITS // 2:
        return mpf(0)  # what is left is rounding
    return total


def _subtract(run: Evaluation, one: Any, other: Any) -> Any:
    return _add(run, one, -other)


def _multiply(run: Evaluation, one: Any, other: Any) -> Any:
    return one * other


def _divide(run: Evaluation, one: Any, other: Any) -> Any:
    if not other:
        raise Undefined("division by zero")
    return one / other


def _power(run: Evaluation, base: Any, exponent: Any) -> Any:
    if not base:
        if mp.re(exponent) <= 0:
            raise Undefined("a power of zero")
        return mpf(0)
    if abs(exponent) * (abs(mp.mag(base)) + 4) > 2 * MAX_MAGNITUDE:
        raise Refused("a power is too large to be computed")
    whole = _whole(exponent)
    if whole is not None:
        return base**whole
    if _negative(base):
        odd = _odd_root(exponent)
        if odd is not None:
            return (-1) ** odd * (-base) ** exponent
        run.left_reals = True
    return mp.power(base, exponent)


def _odd_root(exponent: Any) -> int | None:
    """The numerator of a real exponent with a small odd denominator, whose power of a negative number is real; None otherwise."""
    if mp.im(exponent):
        return None
    for under in (3, 5, 7, 9):
        over = _whole(exponent * under)
        if over is not None:
            return over
    return None


def _root(run: Evaluation, degree: Any, radicand: Any) -> Any:
    return _power(run, radicand, _divide(run, mpf(1), degree))


def _sqrt(run: Evaluation, radicand: Any) -> Any:
    run.left_reals |= _negative(radicand)
    return mp.sqrt(radicand)


def _ln(run: Evaluation, value: Any) -> Any:
    if not value:
        raise Undefined("the logarithm of zero")
    run.left_reals |= _negative(value)
    return mp.log(value)


def _log(run: Evaluation, base: Any, value: Any) -> Any:
    return _divide(run, _ln(run, value), _ln(run, base))


def _exp(run: Evaluation, value: Any) -> Any:
    if abs(value) > MAX_MAGNITUDE // 2:
        raise Refused("an exponential is too large to be computed")
    return mp.exp(value)


def _snapped(run: Evaluation, value: Any) -> Any:
    """0 for a sine or cosine that is rounding alone."""
    return mpf(0) if value and mp.mag(value) < run.largest - run.bits + ROUNDING_BITS // 2 else value


def _sin(run: Evaluation, value: Any) -> Any:
    return _snapped(run, mp.sin(_turned(value)))


def _cos(run: Evaluation, value: Any) -> Any:
    return _snapped(run, mp.cos(_turned(value)))


def _turned(value: Any) -> Any:
    if abs(mp.im(value)) > MAX_MAGNITUDE // 2:
        raise Refused("a sine is too large to be computed")
    return value


def _of_real(function: Any, name: str) -> Any:
    def run_it(run: Evaluation, value: Any) -> Any:
        if mp.im(value):
            raise Refused(f"{name} of a complex number")
        return function(value)

    return run_it


def _floor(value: Any) -> Any:
    nearest = mp.nint(value)
    return nearest if abs(value - nearest) < mpf(2) ** (ROUNDING_BITS - mp.prec) else mp.floor(value)


def _hyperbolic(function: Any) -> Any:
    def run_it(run: Evaluation, value: Any) -> Any:
        if abs(value) > MAX_MAGNITUDE // 2:
            raise Refused("an exponential is too large to be computed")
        return function(value)

    return run_it


def _arc(function: Any) -> Any:
    def run_it(run: Evaluation, value: Any) -> Any:
        found = function(value)
        run.left_reals |= bool(mp.im(found)) and not mp.im(value)
        return found

    return run_it


def _factorial(run: Evaluation, value: Any) -> Any:
    whole = _whole(value)
    if abs(value) > MAX_GAMMA:
        raise Refused(f"a factorial of more than {MAX_GAMMA}")
    if whole is not None and whole < 0:
        raise Undefined("the factorial of a negative number")
    return mpf(math.factorial(whole)) if whole is not None else mp.gamma(value + 1)


def _binom(run: Evaluation, over: Any, under: Any) -> Any:
    if max(abs(over), abs(under)) > MAX_GAMMA:
        raise Refused(f"a binomial coefficient of more than {MAX_GAMMA}")
    n, k = _whole(over), _whole(under)
    if n is not None and k is not None and n >= 0:
        return mpf(math.comb(n, k)) if k >= 0 else mpf(0)
    return mp.binomial(over, under)


def _whole(value: Any) -> int | None:
    if mp.im(value) or abs(value) > 10**6:
        return None
    nearest = int(mp.nint(mp.re(value)))
    return nearest if abs(value - nearest) < mpf(2) ** (ROUNDING_BITS - mp.prec) else None


def _negative(value: Any) -> bool:
    return not mp.im(value) and mp.re(value) < 0


_CONSTANTS = {
    "pi": lambda: +mp.pi,
    "e": lambda: +mp.e,
    "i": lambda: mpc(0, 1),
    "unknown base": lambda: mpf(5381) / 1009,  # \log without one: what holds for this holds for every base
}
_OPERATIONS = {
    "+": _add, "-": _subtract, "*": _multiply, "/": _divide, "^": _power, "sqrt": _sqrt, "root": _root, "ln": _ln, "log": _log,
    "exp": _exp, "!": _factorial, "binom": _binom, "sin": _sin, "cos": _cos,
    "tan": lambda run, x: _divide(run, _sin(run, x), _cos(run, x)),
    "cot": lambda run, x: _divide(run, _cos(run, x), _sin(run, x)),
    "sec": lambda run, x: _divide(run, mpf(1), _cos(run, x)),
    "csc": lambda run, x: _divide(run, mpf(1), _sin(run, x)),
    "arcsin": _arc(lambda x: mp.asin(x)), "arccos": _arc(lambda x: mp.acos(x)), "arctan": _of_real(lambda x: mp.atan(x), "arctan"),
    "sinh": _hyperbolic(lambda x: mp.sinh(x)), "cosh": _hyperbolic(lambda x: mp.cosh(x)), "tanh": _hyperbolic(lambda x: mp.tanh(x)),
    "abs": lambda run, x: abs(x),
    "floor": _of_real(_floor, "floor"), "ceil": _of_real(lambda x: -_floor(-x), "ceil"),
}  # fmt: skip
