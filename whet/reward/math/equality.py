"""Equality of two forms: what is the same mathematics, decided at once where numbers are exact, else by values in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from whet.reward.math.arithmetic import Tree, parts_of, symbols_of
from whet.reward.math.forms import SYMBOL, Form, Item, Leaf
from whet.reward.math.grammar import Refused
from whet.reward.math.units import parse_unit
from whet.reward.math.values import BITS, Value, agree, close, exact_value, points, values_at
from whet.types import JSON

SETTLE = "whet.reward.math.equality:settle"

BAD_LABEL = "label: "
_FAULTS = (Refused, ArithmeticError, ValueError, RecursionError, MemoryError)
"""Errors from computing formulas that a model wrote: a refusal, or mpmath's errors."""
MAX_PAIRS = 20_000
"""Comparisons of members that an unordered answer may take."""
_HALF_DAY_S = 12 * 3600
_DEGREE = parse_unit("degree").dimension


@dataclass(frozen=True, slots=True)
class Question:
    """Two answers of one kind whose members have to be compared in value, as JSON."""

    data: JSON


def compare(label: Form, answer: Form) -> bool | Question:
    """True if two answers are equal; a question if only values of formulas can tell."""
    if label.kind != answer.kind:
        return False
    if label.kind == "time":
        return _times(label.key, answer.key)
    if label.kind == "ratio":
        return len(label.key) == len(answer.key) and all(_same_part(a, b) for a, b in zip(label.key, answer.key, strict=True))
    if label.kind != "items":
        return label.key == answer.key
    if label.name and answer.name and label.name != answer.name:
        return False
    label, answer = _as_equations(label, answer)
    named = _by_name(label, answer)
    if named is None:
        return False
    first, second = named
    ordered = bool(label.names or answer.names) or label.shape == "one"
    if len(first) != len(second) or not (label.names or answer.names or _shapes_fit(label.shape, answer.shape)):
        return False
    question = {
        "ordered": ordered,
        "set": "set" in (label.shape, answer.shape),
        "first": [_item_json(item) for item in first],
        "second": [_item_json(item) for item in second],
        "conditions": [[one, other] for one, other in (*label.conditions, *answer.conditions)],
    }
    if _is_exact(question):
        return settle(question) == "equal"
    return Question(question)


def _times(label: Sequence[str | int | None], answer: Sequence[str | int | None]) -> bool:
    """Equality of two times. A time up to 12:59 without a.m. and p.m. can be either, compared with one
    that has it."""
    (first, clock), (second, other_clock) = label, answer
    assert isinstance(first, int) and isinstance(second, int)
    if {clock, other_clock} == {"either", "halves"}:
        return first % _HALF_DAY_S == second % _HALF_DAY_S
    return first == second


def _same_part(one: str | int | None, other: str | int | None) -> bool:
    return Fraction(str(one)) == Fraction(str(other))


def _by_name(label: Form, answer: Form) -> tuple[Sequence[Item], Sequence[Item]] | None:
    """The items of both in one order, where they have names; None if the names do not fit."""
    if not label.names and not answer.names:
        return label.items, answer.items
    if label.names and answer.names:
        return (label.items, answer.items) if label.names == answer.names else None
    named, other = (label, answer) if label.names else (answer, label)
    point = other.shape == "one" and len(other.items) == 1 and other.items[0].tag == f"({',' * (len(named.items) - 1)})"
    if not point or list(named.names) != [chr(ord(named.names[0][0]) + k) for k in range(len(named.names))]:
        return None
    spread = tuple(Item("", (leaf,)) for leaf in other.items[0].leaves)
    return (named.items, spread) if label.names else (spread, named.items)


def _as_equations(label: Form, answer: Form) -> tuple[Form, Form]:
    """`y = 2x` as the equation y - 2x = 0, where the other one is an equation."""
    if answer.items and answer.items[0].tag == "=":
        return _as_equation(label), answer
    return (label, _as_equation(answer)) if label.items and label.items[0].tag == "=" else (label, answer)


def _as_equation(form: Form) -> Form:
    if form.shape != "one" or form.name is None or form.conditions or form.items[0].tag or not SYMBOL.fullmatch(form.name):
        return form
    return Form("items", items=(Item("=", (Leaf(["-", ["symbol", form.name], form.items[0].leaves[0].tree]),)),))


def _shapes_fit(label: str, answer: str) -> bool:
    return label == answer or {label, answer} == {"list", "set"}


def _item_json(item: Item) -> JSON:
    return [item.tag, [_leaf_json(leaf) for leaf in item.leaves]]


def _leaf_json(leaf: Leaf) -> JSON:
    """The readings of a leaf: tree, percent, unit's dimension and factor, whether the other side has to name a unit."""
    unit = [leaf.unit.dimension, str(leaf.unit.factor)] if leaf.unit else None
    readings: list[JSON] = [[leaf.tree, leaf.percent, unit, False]]
    quantity = leaf.quantity
    if quantity is not None and quantity.unit is not None:
        value: Tree = ["number", str(abs(quantity.value))]
        tree = ["-", ["number", "0"], value] if quantity.value < 0 else value
        readings.append([tree, quantity.percent, [quantity.unit.dimension, str(quantity.unit.factor)], leaf.wants_unit])
    return readings


def _is_exact(question: JSON) -> bool:
    """True if every tree is a plain number."""
    trees = [reading[0] for side in ("first", "second") for item in question[side] for leaf in item[1] for reading in leaf]
    trees += [tree for pair in question["conditions"] for tree in pair]
    return all(_is_number(tree) for tree in trees)


def _is_number(tree: Tree) -> bool:
    return tree[0] in ("number", "oo", "-oo") or (tree[0] == "-" and tree[1] == ["number", "0"] and tree[2][0] == "number")


def settle(question: JSON) -> str:
    """`equal`, `different`, or why the two cannot be compared, after `BAD_LABEL` if it is for the label alone.

    Its cost is bounded: see `whet.reward.math.values`.
    """
    comparison = _Comparison(question)
    try:
        return "equal" if comparison.holds() else "different"
    except _FAULTS as fault:
        return comparison.fault_of_label() or _text_of_fault(fault)


def _text_of_fault(fault: Exception) -> str:
    return str(fault) if isinstance(fault, Refused) else f"it has no value that can be computed ({type(fault).__name__})"


class _Comparison:
    """One question; each tree is computed once at each point."""

    def __init__(self, question: JSON) -> None:
        self._question = question
        trees = [reading[0] for side in ("first", "second") for item in question[side] for leaf in item[1] for reading in leaf]
        trees += [tree for pair in question["conditions"] for tree in pair]
        self._points = points(set().union(*(symbols_of(tree) for tree in trees)))
        self._values: dict[tuple[str, int, int], Value | None] = {}

    def holds(self) -> bool:
        first, second = self._question["first"], self._question["second"]
        if not all(self._equal(one, other) for one, other in self._question["conditions"]):
            return False
        if self._question["ordered"]:
            return all(self._same_item(one, other) for one, other in zip(first, second, strict=True))
        return self._matched(first, second)

    def fault_of_label(self) -> str | None:
        """Why the label's own formulas cannot be computed; None if they can."""
        try:
            for item in self._question["first"]:
                for leaf in item[1]:
                    self._at_point(leaf[0][0], 0, BITS)
        except _FAULTS as fault:
            return BAD_LABEL + _text_of_fault(fault)
        return None

    def _matched(self, first: Sequence[JSON], second: Sequence[JSON]) -> bool:
        """True if each item has its own partner on the other side; in a set, repeated items count once."""
        if len(first) * len(second) > MAX_PAIRS:
            raise Refused("its lists are too long to be compared")
        left = list(second)
        for one in first:
            place = next((k for k, other in enumerate(left) if self._same_item(one, other)), None)
            if place is None:
                return False
            del left[place]
        return True

    def _same_item(self, one: JSON, other: JSON) -> bool:
        if one[0] != other[0] or len(one[1]) != len(other[1]):
            return False
        if one[0] in ("=", "!=", "0<", "0<="):
            return self._proportional(one[1][0][0][0], other[1][0][0][0], positive=one[0].startswith("0"))
        return all(self._same_leaf(a, b) for a, b in zip(one[1], other[1], strict=True))

    def _same_leaf(self, one: JSON, other: JSON) -> bool:
        return any(self._same_reading(a, b) for a in one for b in other)

    def _same_reading(self, one: JSON, other: JSON) -> bool:
        (tree, percent, unit, wants_unit), (tree2, percent2, unit2, wants_unit2) = one, other
        if (wants_unit and not unit2) or (wants_unit2 and not unit):
            return False
        if unit and unit2:
            if unit[0] != unit2[0]:
                return False
            if unit[1] != unit2[1]:
                tree, tree2 = ["*", tree, ["number", unit[1]]], ["*", tree2, ["number", unit2[1]]]
        elif (unit or unit2 or [""])[0] == _DEGREE and self._same_angle(*((tree, tree2) if unit else (tree2, tree))):
            return True
        if percent == percent2:
            return self._equal(tree, tree2)
        if unit or unit2:
            return False
        part, plain = (tree, tree2) if percent else (tree2, tree)
        if self._equal(["/", part, ["number", "100"]], plain):
            return True
        figure = exact_value(part)  # data sets drop the sign of 50%, but 0.5 is not 0.5%
        return figure is not None and abs(figure) >= 1 and self._equal(part, plain)

    def _same_angle(self, degrees: Tree, other: Tree) -> bool:
        """True if `degrees` degrees are an angle that is written with pi."""
        return _has(other, "pi") and self._equal(["/", ["*", degrees, ["pi"]], ["number", "180"]], other)

    def _equal(self, one: Tree, other: Tree) -> bool:
        if one == other:
            return True
        if one[0] in ("oo", "-oo") or other[0] in ("oo", "-oo"):
            return False
        exact = exact_value(one), exact_value(other)
        if exact[0] is not None and exact[1] is not None:
            return exact[0] == exact[1]
        return agree(self._pairs(one, other))

    def _pairs(self, one: Tree, other: Tree) -> list[tuple[Value | None, Value | None]]:
        """The values of both at each point, found with the same number of bits."""
        pairs: list[tuple[Value | None, Value | None]] = []
        for k in range(len(self._points)):
            a, b = self._at_point(one, k, BITS), self._at_point(other, k, BITS)
            if a is not None and b is not None and a.bits != b.bits:
                bits = max(a.bits, b.bits)
                a, b = self._at_point(one, k, bits), self._at_point(other, k, bits)
            pairs.append((a, b))
        return pairs

    def _at_point(self, tree: Tree, k: int, bits: int) -> Value | None:
        key = (repr(tree), k, bits)
        if key not in self._values:
            self._values[key] = values_at(tree, self._points[k], bits)
        return self._values[key]

    def _proportional(self, one: Tree, other: Tree, *, positive: bool) -> bool:
        """True if one tree is a constant times the other: two equations with the same solutions."""
        if one == other:
            return True
        pairs = [(a, b) for a, b in self._pairs(one, other) if a and b]
        if len(pairs) < 2 or not all(a.number and b.number for a, b in pairs):
            return False
        a0, b0 = pairs[0]
        same_ratio = all(close(_scaled(a, b0), _scaled(b, a0)) for a, b in pairs)
        return same_ratio and (not positive or (a0.number.real > 0) == (b0.number.real > 0))


def _scaled(value: Value, factor: Value) -> Value:
    size = abs(value.number) + abs(factor.number) + 1
    return Value(value.number * factor.number, value.bits, (value.error + factor.error) * size * size)


def _has(tree: Tree, kind: str) -> bool:
    return tree[0] == kind or any(_has(part, kind) for part in parts_of(tree))
