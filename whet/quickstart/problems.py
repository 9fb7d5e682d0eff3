"""The quickstart's problems: integer arithmetic in words, one or two operations, made from templates.

Training and held-out problems never share a (template, operands) pair: a hash of the pair decides which side
it is on.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Template:
    """A wording and what it asks for."""

    text: str
    """With {a}, {b} and, for two operations, {c}."""
    operators: tuple[str, ...]
    """One or two, applied from left to right: (a op b) op c."""
    sloppy: int | None = None
    """Which operation the demonstrators mostly get wrong (0 or 1), or None where they are careful."""
    mistake: str = ""
    """The operator that they write there instead."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A template with its operands."""

    template: int
    operands: tuple[int, ...]

    @property
    def text(self) -> str:
        return TEMPLATES[self.template].text.format(**dict(zip("abc", self.operands, strict=False)))

    @property
    def operators(self) -> tuple[str, ...]:
        return TEMPLATES[self.template].operators

    @property
    def answer(self) -> int:
        return results(self.operands, self.operators)[-1]

    @property
    def held_out(self) -> bool:
        key = f"{self.template}:{self.operands}".encode()
        return zlib.crc32(key) % 1000 < HELD_OUT_SHARE * 1000


TEMPLATES = (
    Template("Tom has {a} apples and buys {b} more. How many apples does he have now?", ("+",)),
    Template("A school has {a} boys and {b} girls. How many children are there?", ("+",), 0, "*"),
    Template("Ann has {a} coins and gives away {b}. How many coins are left?", ("-",)),
    Template("A shop had {a} lamps and sold {b} of them. How many lamps remain?", ("-",), 0, "+"),
    Template("There are {b} boxes with {a} pens in each. How many pens are there?", ("*",)),
    Template("A train has {b} cars with {a} seats each. How many seats does it have?", ("*",), 0, "+"),
    Template("Tom has {a} apples, buys {b} more and then eats {c}. How many apples are left?", ("+", "-")),
    Template("Ann has {a} coins, loses {b} and then finds {c}. How many coins does she have?", ("-", "+"), 1, "-"),
    Template("There are {b} boxes with {a} pens in each and {c} loose pens. How many pens are there?", ("*", "+"), 1, "*"),
    Template("There were {b} bags with {a} nuts in each, but {c} nuts were bad. How many good nuts?", ("*", "-"), 1, "+"),
    Template("A bus has {a} people, {b} leave and then {c} more leave. How many people stay?", ("-", "-"), 0, "+"),
    Template("A farm has {a} hens, {b} ducks and {c} geese. How many birds are there?", ("+", "+"), 0, "*"),
)


def results(operands: tuple[int, ...], operators: tuple[str, ...]) -> list[int]:
    """The value after each operation."""
    values = [operands[0]]
    for operator, operand in zip(operators, operands[1:], strict=True):
        left = values[-1]
        values.append({"+": left + operand, "-": left - operand, "*": left * operand}[operator])
    return values[1:]


def draw(rng: random.Random, *, held_out: bool) -> Problem:
    """One problem of the wanted side, templates equally often; no result is negative."""
    template = rng.randrange(len(TEMPLATES))
    while True:
        problem = Problem(template, _operands(rng, TEMPLATES[template].operators))
        if problem.held_out == held_out and min(results(problem.operands, problem.operators)) >= 0:
            return problem


def _operands(rng: random.Random, operators: tuple[str, ...]) -> tuple[int, ...]:
    operands = [rng.randint(11, 99)]
    for operator in operators:
        operands.append(rng.randint(2, 9) if operator == "*" else rng.randint(2, 99))
    return tuple(operands)


def draw_many(num: int, seed: int, *, held_out: bool) -> list[Problem]:
    """Distinct problems, the same for the same seed."""
    rng = random.Random(f"{seed}/{held_out}")
    chosen: dict[Problem, None] = {}
    while len(chosen) < num:
        chosen[draw(rng, held_out=held_out)] = None
    return list(chosen)
