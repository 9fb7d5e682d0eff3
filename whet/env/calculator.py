"""A calculator tool: exact arithmetic on a whitelisted grammar. Nothing the model writes is ever evaluated as code."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 200
MAX_DEPTH = 20
MAX_DIGITS = 60
_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|[-+*/()])")


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / and parentheses, for example "12 * (3 + 4)".
    """
    value = _Reader(_tokens(expression)).read()
    if value.denominator == 1:
        return str(value.numerator)
    return _decimal(value)


def _tokens(expression: str) -> list[str]:
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_LENGTH}")
    tokens: list[str] = []
    place = 0
    text = expression.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"cannot read {text[place:].strip()[:20]!r} in the expression")
        tokens.append(match.group(1))
        place = match.end()
    return tokens


class _Reader:
    """Recursive descent over `sum = product (± product)*`, `product = factor (*/ factor)*`, `factor = ± factor | number
    | (sum)`."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def read(self) -> Fraction:
        value = self._sum()
        if self._peek() is not None:
            raise ValueError(f"unexpected {self._peek()!r} in the expression")
        return value

    def _peek(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self) -> str:
        token = self._peek()
        if token is None:
            raise ValueError("the expression ends too early")
        self._place += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        return _bounded(value)

    def _product(self) -> Fraction:
        value = self._factor()
        while self._peek() in ("*", "/"):
            if self._take() == "*":
                value = _bounded(value * self._factor())
                continue
            divisor = self._factor()
            if divisor == 0:
                raise ValueError("division by zero")
            value = _bounded(value / divisor)
        return value

    def _factor(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"the expression is nested more than {MAX_DEPTH} deep")
        token = self._take()
        if token in ("+", "-"):
            value = self._factor() if token == "+" else -self._factor()
        elif token == "(":
            value = self._sum()
            if self._take() != ")":
                raise ValueError("a parenthesis is not closed")
        elif token[0].isdigit():
            value = Fraction(token)
        else:
            raise ValueError(f"unexpected {token!r} in the expression")
        self._depth -= 1
        return value


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value


def _decimal(value: Fraction) -> str:
    """Rounded to six places (ties to even), without trailing zeros."""
    whole, rest = divmod(abs(round(value * 10**6)), 10**6)
    digits = f"{whole}.{rest:06d}".rstrip("0").rstrip(".")
    return f"-{digits}" if value < 0 and digits != "0" else digits
