r"""Answers by what they are: a number, a formula, a list, a set, an interval, a matrix, an equation, a date, a choice, words.

An answer that can be read for certain becomes a `Form`; two forms are compared by what they mean (`whet.reward.math.equality`). What can be
read in several ways is `Ambiguous`: it is compared as text alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from whet.reward.math.arithmetic import Tree, symbols_of
from whet.reward.math.formula import Ambiguous, parse_latex
from whet.reward.math.grammar import GREEK, Refused, check_formula
from whet.reward.math.number import Number, parse_number
from whet.reward.math.scanning import bracketed, find_top, split_top
from whet.reward.math.units import Unit
from whet.reward.math.words import date_of, plain_form

Kind = Literal["items", "words", "choice", "date", "time", "base", "range", "ratio"]
Shape = Literal["one", "list", "set", "union"]

_MARKED = re.compile(
    r"(?<!\.)(?<!\.\d)(?<!\.\d\d)\\(?:overline|angle|triangle|vec|hat|bar|widehat|overrightarrow|parallel|perp|odot|cong)(?![A-Za-z])"
)
"""Signs of geometry and of vectors; a line over repeating decimals is none."""
MAX_ITEMS = 100
"""Number of items of a list, set or matrix."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A number or formula within an answer."""

    tree: Tree
    percent: bool = False
    unit: Unit | None = None
    quantity: Number | None = None
    """The other reading of a number with a letter: `5 m` is five times m, or five meters."""
    wants_unit: bool = False
    """The reading counts only if the other side has a unit: `5m`, without a space."""


@dataclass(frozen=True, slots=True)
class Item:
    """One member of an answer: its numbers, and a tag that says what they make up (`(,)` a pair or open interval, `=` an equation)."""

    tag: str
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an answer."""

    kind: Kind
    shape: Shape = "one"
    items: tuple[Item, ...] = ()
    name: str | None = None
    """Left side of `x = ...`, or the variable of an inequality."""
    names: tuple[str, ...] = ()
    """Names of the items of `x = 1, y = 2`."""
    conditions: tuple[tuple[Tree, Tree], ...] = ()
    """Trees that have to be equal for the answer to stand, as in `2 + 3 = 5`."""
    key: tuple[str | int | None, ...] = ()
    """Value that is compared, for every kind other than items."""


_RELATION = re.compile(r"\\(?:le|lt|ge|gt|ne|in|approx)(?![A-Za-z])|[=<>]")
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_OPERATORS = {"\\le": "<=", "\\lt": "<", "\\ge": ">=", "\\gt": ">", "\\ne": "!="}
_LETTER = r"[A-Za-z](?:_(?:\w|\{\w+\}))?"
_GREEK_LETTER = rf"\\(?:{'|'.join(GREEK.split())})(?:_\w)?"
_NAME = re.compile(rf"{_LETTER}'*(?:\s*\(\s*[A-Za-z]\s*\))?|{_GREEK_LETTER}|(?:\\text\s*\{{)?[A-Za-z][A-Za-z ]{{2,40}}\}}?")
SYMBOL = re.compile(rf"{_LETTER}|{_GREEK_LETTER}")
_MATRIX = re.compile(r"\\begin\s*\{([pbB]?matrix)\}(.*)\\end\s*\{\1\}", re.DOTALL)
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_SEPARATORS = (",", ";", r"\\text\s*\{\s*(?:and|or)\s*\}", r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])")
_INFINITY = re.compile(r"([-+]?)\s*\\(?:infty|infin)(?![A-Za-z])")
_EMPTY = re.compile(r"\\emptyset|\\\{\s*\\\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?")


def read_form(text: str) -> Form:
    """The form of a normalised answer.

    Raises:
        Ambiguous: it may be read in several ways, or says what is not computed.
        Refused: it is no well-formed answer, or beyond the bounds of a formula.
    """
    if mark := _MARKED.search(text):
        raise Ambiguous(f"{mark.group()} is compared as text")
    date = date_of(text)
    number = parse_number(text) if date is None else None
    if number is not None:
        return _one(Item("", (_leaf_of(number),)))
    plain = date or plain_form(text)
    if plain is not None:
        kind, key = plain
        return Form(kind, key=key)
    whole = bracketed(text) is not None or _MATRIX.fullmatch(text)
    parts = [text] if whole else [part for part in split_top(_grouped(text), _SEPARATORS) if part]
    if len(parts) > MAX_ITEMS:
        raise Refused(f"it is a list of more than {MAX_ITEMS}")
    return _list(text, parts) if len(parts) > 1 else _single(parts[0] if parts else text)


def _one(item: Item) -> Form:
    return Form("items", items=(item,))


def _leaf_of(number: Number) -> Leaf:
    value = number.value
    tree: Tree = ["number", str(abs(value))]
    return Leaf(["-", ["number", "0"], tree] if value < 0 else tree, number.percent, number.unit)


def _grouped(text: str) -> str:
    """Without the commas of thousands, where a list's commas are followed by spaces."""
    return _THOUSANDS.sub("", text) if ", " in text else text


def _list(text: str, parts: list[str]) -> Form:
    forms = [_single(part) for part in parts]
    if any(form.conditions for form in forms):
        raise Ambiguous("a list of equations")
    names = [form.name for form in forms]
    if all(form.shape == "one" and form.items[0].tag[:1] in "([" and form.items[0].tag for form in forms) and any(names):
        if _OR.search(text) and len(set(names)) == 1:
            return Form("items", "union", tuple(item for form in forms for item in form.items), name=names[0])
        raise Ambiguous("several inequalities")
    if any(form.shape in ("set", "union") for form in forms):
        raise Ambiguous("a list of sets")
    items = tuple(item for form in forms for item in form.items)
    if len(set(names)) == 1 or (names[0] and not any(names[1:])):
        return Form("items", "list", items, name=names[0])
    if all(names) and len(set(names)) == len(names) == len(items):
        ordered = sorted(zip((name for name in names if name), items, strict=True), key=lambda pair: pair[0])
        return Form("items", "list", tuple(item for _, item in ordered), names=tuple(name for name, _ in ordered))
    raise Ambiguous("a list of named and nameless values")


def _single(text: str) -> Form:
    text = text.strip()
    relations = find_top(text, _RELATION)
    if relations:
        return _relation(text, relations)
    pieces = [text[: match.start()] for match in find_top(text, re.compile(r"\\cup(?![A-Za-z])"))]
    if pieces:
        return _union(split_top(text, (r"\\cup(?![A-Za-z])",)))
    if _REALS.fullmatch(text):
        return _one(_interval("(", ["-oo"], ["oo"], ")"))
    if _EMPTY.fullmatch(text):
        return Form("items", "set")
    found = bracketed(text)
    if found is not None:
        opener, inner, closer = found
        if opener == "\\{" or (opener == "{" and find_top(inner, re.compile(","))):
            return _set(inner)
        parts = split_top(inner, (",", ";"))
        if len(parts) > 1:
            return _one(_tuple(opener, parts, closer))
        if opener == "\\langle":
            raise Ambiguous("angle brackets")
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        return _one(_matrix(matrix.group(2)))
    signs = _PLUS_MINUS.findall(text)
    if signs:
        both = [_PLUS_MINUS.sub(lambda match, k=k: " + " if (match.group(1) == "pm") == (k == 0) else " - ", text) for k in (0, 1)]
        return Form("items", "list", tuple(Item("", (_leaf(each),)) for each in both))
    return _one(Item("", (_leaf(text),)))


def _leaf(text: str) -> Leaf:
    text = text.strip()
    number = parse_number(text)
    if number is not None:
        return _leaf_of(number)
    if infinity := _INFINITY.fullmatch(text):
        return Leaf(["-oo"] if infinity.group(1) == "-" else ["oo"])
    quantity = parse_number(text, lone_letters=True)
    if text.endswith("%"):
        return Leaf(parse_latex(text.removesuffix("%").removesuffix("\\")), percent=True)
    return Leaf(parse_latex(text), quantity=quantity, wants_unit=" " not in text)


def _set(inner: str) -> Form:
    parts = [part for part in split_top(_grouped(inner), (",", ";")) if part.strip()]
    if len(parts) > MAX_ITEMS:
        raise Refused(f"it is a set of more than {MAX_ITEMS}")
    forms = [_single(part) for part in parts]
    if any(form.shape not in ("one", "list") or form.name or form.conditions for form in forms):
        raise Ambiguous("a set that is described")
    return Form("items", "set", tuple(item for form in forms for item in form.items))


def _tuple(opener: str, parts: list[str], closer: str) -> Item:
    if len(parts) > MAX_ITEMS:
        raise Refused(f"it is a tuple of more than {MAX_ITEMS}")
    if (opener, closer) == ("]", "["):
        opener, closer = "(", ")"
    tag, leaves = opener, ()
    for k, part in enumerate(parts):
        form = _single(part)
        if form.kind != "items" or form.shape != "one" or form.name or form.conditions:
            raise Ambiguous("a tuple of sets or equations")
        tag += ("," if k else "") + form.items[0].tag
        leaves += form.items[0].leaves
    return Item(tag + closer, leaves)


def _interval(opener: str, low: Tree, high: Tree, closer: str) -> Item:
    return Item(f"{opener},{closer}", (Leaf(low), Leaf(high)))


def _union(parts: list[str]) -> Form:
    forms = [_single(part) for part in parts]
    if any(form.shape not in ("one", "set") or form.name or form.conditions for form in forms):
        raise Ambiguous("a union of what are no sets")
    items: list[Item] = []
    for form in forms:
        if form.shape == "set":
            items += [Item(f"{{{item.tag}}}", item.leaves) for item in form.items]
        elif re.fullmatch(r"[(\[],[)\]]", form.items[0].tag):
            items += form.items
        else:
            raise Ambiguous("a union of what are no sets")
    return Form("items", "union", tuple(items))


def _matrix(inner: str) -> Item:
    rows = [row.split("&") for row in re.split(r"\\\\", inner.strip().removesuffix("\\\\"))]
    if len({len(row) for row in rows}) != 1:
        raise Refused("the rows of its matrix have different lengths")
    if len(rows) * len(rows[0]) > MAX_ITEMS:
        raise Refused(f"its matrix has more than {MAX_ITEMS} entries")
    return Item(f"matrix {len(rows)}x{len(rows[0])}", tuple(_leaf(cell) for row in rows for cell in row))


def _relation(text: str, relations: list[re.Match[str]]) -> Form:
    ends = [0, *(match.end() for match in relations)]
    sides = [text[a:b].strip() for a, b in zip(ends, [*(match.start() for match in relations), len(text)], strict=True)]
    operators = [_OPERATORS.get(match.group(), match.group()) for match in relations]
    if not all(sides):
        raise Refused("a relation has an empty side")
    if set(operators) == {"="}:
        return _equation(sides)
    if operators == ["\\in"] and SYMBOL.fullmatch(sides[0]):
        return replace(_single(sides[1]), name=_canonical(sides[0]))
    if any(operator in ("=", "\\in", "\\approx") for operator in operators):
        raise Ambiguous("relations of several kinds")
    return _inequality(sides, operators)


def _canonical(name: str) -> str:
    name = re.sub(r"\\text\s*\{([^{}]*)\}?", r"\1", name)
    return re.sub(r"[\s{}]", "", name)


def _equation(sides: list[str]) -> Form:
    if _NAME.fullmatch(sides[0]):
        name, values = _canonical(sides[0]), sides[1:]
        form = _single(values[-1])
        variables = {name, *re.findall(r"\A\\?[A-Za-z]+", name)}
        if any(symbols_of(leaf.tree) & variables for item in form.items for leaf in item.leaves):
            return _general_equation(sides)
        return replace(form, name=name, conditions=_chain(values) if len(values) > 1 else ())
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and SYMBOL.fullmatch(sides[1]) and parse_number(sides[0]):
        return replace(_single(sides[0]), name=_canonical(sides[1]))
    trees = [parse_latex(side) for side in sides]
    if any(symbols_of(tree) for tree in trees):
        return _general_equation(sides)
    return replace(_one(Item("", (_leaf(sides[-1]),))), conditions=_chain(sides))


def _chain(sides: list[str]) -> tuple[tuple[Tree, Tree], ...]:
    trees = [_leaf(side).tree for side in sides]
    return tuple((tree, trees[-1]) for tree in trees[:-1])


def _general_equation(sides: list[str]) -> Form:
    if len(sides) != 2:
        raise Ambiguous("a chain of equations")
    return _one(Item("=", (Leaf(["-", parse_latex(sides[0]), parse_latex(sides[1])]),)))


def _inequality(sides: list[str], operators: list[str]) -> Form:
    directions = {operator[0] for operator in operators}
    if len(operators) == 1 and directions == {"!"}:
        return _one(Item("!=", (Leaf(["-", parse_latex(sides[0]), parse_latex(sides[1])]),)))
    if directions not in ({"<"}, {">"}) or len(operators) > 2:
        raise Ambiguous("relations of several kinds")
    if directions == {">"}:
        sides, operators = sides[::-1], [_FLIPPED[operator] for operator in operators[::-1]]
    opener, closer = ("[" if operators[0] == "<=" else "("), ("]" if operators[-1] == "<=" else ")")
    if len(operators) == 2:
        if not SYMBOL.fullmatch(sides[1]):
            raise Ambiguous("a chain of inequalities")
        return _bounded(sides[1], opener, _leaf(sides[0]), _leaf(sides[2]), closer)
    if SYMBOL.fullmatch(sides[0]) and not SYMBOL.fullmatch(sides[1]):
        return _bounded(sides[0], "(", Leaf(["-oo"]), _leaf(sides[1]), closer)
    if SYMBOL.fullmatch(sides[1]) and not SYMBOL.fullmatch(sides[0]):
        return _bounded(sides[1], opener, _leaf(sides[0]), Leaf(["oo"]), ")")
    tree: Tree = ["-", parse_latex(sides[1]), parse_latex(sides[0])]
    return _one(Item(f"0{operators[0]}", (Leaf(tree),)))


def _bounded(name: str, opener: str, low: Leaf, high: Leaf, closer: str) -> Form:
    """The values of a variable between two bounds, as an interval."""
    check_formula(name)
    name = _canonical(name)
    if any(symbols_of(leaf.tree) for leaf in (low, high)):
        raise Ambiguous("an inequality of several variables")
    return Form("items", items=(Item(f"{opener},{closer}", (low, high)),), name=name)
