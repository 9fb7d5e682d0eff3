"""docs/algorithms.md as something that can be read and computed again: tables, arithmetic, and which of its numbers were looked at."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

PATH = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
NUMERAL = re.compile(r"(?<![\w.₀-₉])\d+(?:\.\d+)*(?:e-?\d+)?")
CLOSE = 5.01e-5
"""Numbers are printed with four decimals, so that the next ones up and down are out of reach."""
FUNCTIONS = {"sqrt": math.sqrt, "log": math.log, "exp": math.exp, "sigmoid": lambda x: 1 / (1 + math.exp(-x))}
SIGNS = {"−": "-", "·": "*", "²": "**2", "√": "sqrt", "σ": "sigmoid", "ρ": "rho", **{"₀₁₂₃₄₅₆₇₈₉"[i]: f"_{i}" for i in range(10)}}


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of the page, and where it begins."""

    text: str
    start: int

    def __float__(self) -> float:
        return float(self.text)


@dataclass(slots=True)
class Page:
    """The page, and the spans of it that a check has looked at."""

    text: str
    seen: list[tuple[int, int]] = field(default_factory=list)

    def see(self, start: int, end: int) -> None:
        self.seen.append((start, end))

    def section(self, heading: str) -> Cell:
        """From a heading to the next one, of whatever level."""
        found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", self.text, re.MULTILINE | re.DOTALL)
        assert found is not None, f"there is no section {heading!r}"
        return Cell(found[1], found.start(1))

    def table(self, heading: str, first: str) -> list[dict[str, Cell]]:
        """The table of a section whose first column has this name; a dict per row."""
        section = self.section(heading)
        found = re.search(rf"^\| {re.escape(first)} \|.*\n(?:\|.*\n)+", section.text, re.MULTILINE)
        assert found is not None, f"{heading} has no table of {first}"
        at, rows = section.start + found.start(), []
        for line in found[0].splitlines(keepends=True):
            cells, place = [], at + 1
            for piece in re.split(r"(?<!\\)\|", line.rstrip("\n"))[1:-1]:
                cells.append(Cell(piece.strip(), place + len(piece) - len(piece.lstrip())))
                place += len(piece) + 1
            rows.append(cells)
            at += len(line)
        names = [cell.text.strip("`") for cell in rows[0]]
        return [dict(zip(names, row, strict=True)) for row in rows[2:]]

    def number(self, cell: Cell) -> float:
        """A number that something is computed from."""
        self.see(cell.start, cell.start + len(cell.text))
        return float(cell)

    def equal(self, cell: Cell, value: float, what: str) -> None:
        """A number that was computed again."""
        self.see(cell.start, cell.start + len(cell.text))
        assert abs(float(cell) - value) < CLOSE, f"{what}: the page says {cell.text}, it is {value:.6f}"

    def column(self, rows: list[dict[str, Cell]], name: str, values: list[float]) -> None:
        assert len(rows) == len(values)
        for i, (row, value) in enumerate(zip(rows, values, strict=True)):
            self.equal(row[name], value, f"row {i + 1} of {name}")

    def found(self, pattern: str) -> list[Cell]:
        """The groups of a pattern that the page has once; its blanks may be line ends."""
        found = list(re.finditer(pattern.replace(" ", r"\s+"), self.text))
        assert len(found) == 1, f"the page has {len(found)} of {pattern!r}"
        self.see(found[0].start(), found[0].end())
        return [Cell(found[0][i + 1], found[0].start(i + 1)) for i in range(len(found[0].groups()))]

    def says(self, phrase: str, *values: float) -> None:
        """The page has the phrase, with the values where it has {}, wherever its lines end."""
        told = phrase.format(*(f"{value:g}".replace("e-0", "e-") for value in values))
        self.found(re.escape(told).replace(r"\ ", " "))

    def arithmetic(self, heading: str) -> list[dict[str, float]]:
        """Every block of equations of a section: what its names are. Parts of one line are equal, or the line is wrong."""
        section, blocks = self.section(heading), []
        for block in re.finditer(r"^```text\n(.*?)^```", section.text, re.MULTILINE | re.DOTALL):
            names = dict(blocks[-1]) if blocks else {}
            for line in re.finditer(r".+", block[1]):
                start = section.start + block.start(1) + line.start()
                self.see(start, start + len(line[0]))
                self._equation(line[0], start, names)
            blocks.append(names)
        return blocks

    def _equation(self, line: str, start: int, names: dict[str, float]) -> None:
        name, *parts = line.split(" = ")
        values = [evaluate(part, names) for part in parts]
        last = Cell(parts[-1], start + len(line) - len(parts[-1]))
        for value in values[:-1]:
            self.equal(last, value, line)
        names[name] = values[0]

    def unseen(self) -> list[str]:
        """Numerals that no check has looked at, with what is around them."""
        looked = bytearray(len(self.text))
        for start, end in self.seen:
            looked[start:end] = b"\1" * (end - start)
        lone = [m for m in NUMERAL.finditer(self.text) if not all(looked[m.start() : m.end()])]
        return [self.text[max(m.start() - 50, 0) : m.end() + 30] for m in lone]


def evaluate(expression: str, names: dict[str, float]) -> float:
    """The value of an arithmetic expression in the page's notation."""

    def plain(text: str) -> str:
        for sign, meaning in SIGNS.items():
            text = text.replace(sign, meaning)
        return re.sub(r"sqrt([\w.]+)", r"sqrt(\1)", text)

    known = {plain(name): value for name, value in names.items()}
    return float(eval(plain(expression), {"__builtins__": {}}, {**FUNCTIONS, **known}))
