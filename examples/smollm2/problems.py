"""The problems of the example, made on the spot: sums of two numbers, and four kinds of questions mixed.

    python examples/smollm2/problems.py [--seed 0] [--out runs/smollm2/data]

    sums.jsonl        sums_held_out.jsonl          What is 54 + 68?
    four_kinds.jsonl  four_kinds_held_out.jsonl    also: What is 7 * 8?  Which is the largest (smallest) of 34, 71, 12 and 56?

No problem is in training and held out.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TAIL = "Answer with the number only."
Row = dict[str, str]


def sums() -> list[Row]:
    """Every sum of two numbers of two digits."""
    return [_row(f"What is {a} + {b}?", a + b) for a in range(10, 100) for b in range(10, 100)]


def four_kinds(seed: int = 0) -> dict[str, list[Row]]:
    """As many problems of each kind: sums, products of two numbers from 2 to 12, the largest of four numbers, and the smallest."""
    rng = random.Random(seed)
    found: dict[str, list[Row]] = {"sum": rng.sample(sums(), 121), "product": []}
    found["product"] = [_row(f"What is {a} * {b}?", a * b) for a in range(2, 13) for b in range(2, 13)]
    for kind, pick in (("largest", max), ("smallest", min)):
        fours = [rng.sample(range(10, 100), 4) for _ in range(121)]
        found[kind] = [_row(f"Which is the {kind} of {a}, {b}, {c} and {d}?", pick(a, b, c, d)) for a, b, c, d in fours]
    return {kind: [{**row, "kind": kind} for row in rows] for kind, rows in found.items()}


def four_kinds_split(seed: int = 0) -> tuple[list[Row], list[Row]]:
    """The rows to train on and those held out: 96 and 25 of each kind, in any order."""
    parts = [split(rows, seed, 25) for rows in four_kinds(seed).values()]
    train, held_out = ([row for part in parts for row in part[side]] for side in (0, 1))
    return random.Random(seed).sample(train, len(train)), held_out


def _row(question: str, answer: int) -> Row:
    return {"prompt": f"{question} {TAIL}", "label": str(answer)}


def split(rows: list[Row], seed: int, num_held_out: int = 100) -> tuple[list[Row], list[Row]]:
    """The rows to train on, in any order, and those held out."""
    rows = random.Random(seed).sample(rows, len(rows))
    return rows[num_held_out:], rows[:num_held_out]


def write_all(out: Path, seed: int) -> None:
    """Write the four files."""
    out.mkdir(parents=True, exist_ok=True)
    for name, sides in (("sums", split(sums(), seed)), ("four_kinds", four_kinds_split(seed))):
        for side, rows in zip(("", "_held_out"), sides, strict=True):
            (out / f"{name}{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The problems of the example.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2/data"))
    chosen = parser.parse_args()
    write_all(chosen.out, chosen.seed)
    print(f"problems: {chosen.out}")
