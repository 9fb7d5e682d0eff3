"""Plain formulas (`2x+1`, `3*sqrt(2)/4`, `ln(2)`) as trees: a grammar of its own, so that no text is ever given to an evaluator.

What is read is bounded in length, depth, digits and growth before anything is computed. Only the tree, a nest of lists, goes to a worker,
where `whet.reward.math.values` computes it node by node.
"""

from __future__ import annotations

import math
import re
from typing import Any

from whet.reward.math.grammar import MAX_DIGITS, MAX_LENGTH, MAX_POWER, MAX_TERMS, Refused, TokenReader, tokens_of

MAX_DEPTH = 25
MAX_FACTORIAL = 99

Tree = list[Any]
"""`["number", "12.5"]`, `["symbol", "x"]`, `["pi"]`, or an operator's name and its one or two trees."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3}(?![\da-zA-Z]))?)|(?P<name>[a-zA-Z](?:_[a-zA-Z0-9]+|[a-zA-Z]*))"
    r"|(?P<operator>\*\*|[-+*/^()!]))",
    re.ASCII,
)
_FUNCTIONS = ("sqrt", "ln")
_WHOLE_NAMES = ("mu", "nu", "xi")
"""Two-letter names that are one symbol; any other run of letters is a product of its letters."""


def parse_formula(text: str) -> Tree:
    """The tree of a formula of numbers, letters, pi, sqrt, ln, + - * / ^ ** !, round brackets and products without a sign.

    Raises:
        Refused: it is no such formula, or too long, too deep or of too high a power.
    """
    if len(text) > MAX_LENGTH:
        raise Refused(f"it is {len(text)} characters long; at most {MAX_LENGTH} are compared as a formula")
    parser = _Parser(_tokens(text))
    tree = parser.sum(0)
    parser.check_end()
    if math.comb(_degree(tree) + len(symbols_of(tree)), len(symbols_of(tree))) > MAX_TERMS:
        raise Refused(f"its powers expand to more than {MAX_TERMS} terms")
    return tree


def parts_of(tree: Tree) -> list[Tree]:
    """The trees within a tree, one level down."""
    return [part for part in tree[1:] if isinstance(part, list)]


def symbols_of(tree: Tree) -> set[str]:
    """The names of a tree's symbols."""
    if tree[0] == "symbol":
        return {tree[1]}
    return set().union(*(symbols_of(part) for part in parts_of(tree)))


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    for kind, found in tokens_of(text, _TOKEN):
        if kind == "number" and sum(map(str.isdigit, found)) > MAX_DIGITS:
            raise Refused(f"a number has more than {MAX_DIGITS} digits")
        tokens += _letters(found) if kind == "name" else [(kind, found)]
    return tokens


def _letters(name: str) -> list[tuple[str, str]]:
    if "_" in name or name in ("pi", "oo", *_FUNCTIONS, *_WHOLE_NAMES):
        return [("name", name)]
    return [("name", letter) for letter in name]


class _Parser(TokenReader):
    """Recursive descent with Python's precedences; a product without a sign binds as one with it."""

    def sum(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise Refused(f"it nests deeper than {MAX_DEPTH}")
        tree = self.product(depth)
        while self.text in ("+", "-"):
            tree = [self._take(), tree, self.product(depth)]
        return tree

    def product(self, depth: int) -> Tree:
        tree = self.signed(depth)
        while True:
            if self.text in ("*", "/"):
                tree = [self._take(), tree, self.signed(depth)]
            elif self.kind in ("number", "name") or self.text == "(":
                if self.kind == "number" and self._tokens[self._place - 1][0] == "number":
                    raise Refused("two numbers stand side by side")
                tree = ["*", tree, self.power(depth)]
            else:
                return tree

    def signed(self, depth: int) -> Tree:
        signs = 0
        while self.text in ("+", "-"):
            signs += self._take() == "-"
        tree = self.power(depth)
        return ["-", ["number", "0"], tree] if signs % 2 else tree

    def power(self, depth: int) -> Tree:
        base = self.atom(depth)
        if self.text not in ("^", "**"):
            return base
        self._take()
        if depth >= MAX_DEPTH:
            raise Refused(f"it nests deeper than {MAX_DEPTH}")
        exponent = self.signed(depth + 1)
        if _has(exponent, ("^", "!")):
            raise Refused("a tower of powers")
        if _value_bound(exponent) > MAX_POWER:
            raise Refused(f"a power of more than {MAX_POWER}")
        return ["^", base, exponent]

    def atom(self, depth: int) -> Tree:
        kind, text = self.kind, self._take()
        if kind == "number":
            tree: Tree = ["number", text]
        elif kind == "name" and text in _FUNCTIONS:
            tree = [text, self.power(depth + 1)] if depth < MAX_DEPTH else _too_deep()
        elif kind == "name":
            tree = [text] if text in ("pi", "oo") else ["symbol", text]
        elif text == "(":
            tree = self.sum(depth + 1)
            if self._take() != ")":
                raise Refused("its brackets do not match")
        else:
            raise Refused(f"{text!r} is not expected there")
        while self.text == "!":
            self._take()
            if tree[0] == "!" or (tree[0] != "symbol" and not _is_small_whole(tree)):
                raise Refused(f"a factorial follows a letter or a whole number of at most {MAX_FACTORIAL}")
            tree = ["!", tree]
        return tree


def _too_deep() -> Tree:
    raise Refused(f"it nests deeper than {MAX_DEPTH}")


def _is_small_whole(tree: Tree) -> bool:
    return tree[0] == "number" and tree[1].isdigit() and int(tree[1]) <= MAX_FACTORIAL


def _has(tree: Tree, kinds: tuple[str, ...]) -> bool:
    return tree[0] in kinds or any(_has(part, kinds) for part in parts_of(tree))


def _value_bound(tree: Tree) -> float:
    """No value of an exponent's numbers is larger; symbols count as 1, since they stay symbols."""
    if tree[0] == "number":
        return float(tree[1])
    parts = [_value_bound(part) for part in parts_of(tree)]
    if tree[0] == "/":
        under = tree[2]
        return parts[0] if under[0] in ("symbol", "pi") or (under[0] == "number" and parts[1] >= 1) else math.inf
    if tree[0] in ("+", "-"):
        return sum(parts)
    return math.prod(parts) if parts else 1.0


def _degree(tree: Tree) -> int:
    """Bound on the power to which a bracket can be raised: the product of the exponents over it.

    Raises Refused above MAX_POWER.
    """
    parts = [_degree(part) for part in parts_of(tree)]
    if tree[0] == "^":
        degree = max(1, parts[0]) * max(1, math.ceil(_value_bound(tree[2])))
    elif tree[0] in ("*", "/"):
        degree = sum(parts)
    else:
        degree = max(parts, default=1 if tree[0] == "symbol" else 0)
    if degree > MAX_POWER:
        raise Refused(f"a power of up to {degree} is more than {MAX_POWER}")
    return degree
