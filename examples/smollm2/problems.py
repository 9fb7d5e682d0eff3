"""The problems of the example, made on the spot: sums of two numbers, and sums and differences mixed.

    python examples/smollm2/problems.py [--seed 0] [--out runs/smollm2/data]

    sums.jsonl        sums_held_out.jsonl          What is 54 + 68?
    plus_minus.jsonl  plus_minus_held_out.jsonl    What is 54 + 68?  What is 68 - 54?

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
    return [_row(f"{a} + {b}", a + b) for a in range(10, 100) for b in range(10, 100)]


def plus_minus() -> list[Row]:
    """Every sum and every difference of two numbers of two digits; no difference is negative."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [*sums(), *(_row(f"{a} - {b}", a - b) for a, b in pairs if a >= b)]


def _row(question: str, answer: int) -> Row:
    return {"prompt": f"What is {question}? {TAIL}", "label": str(answer)}


def split(rows: list[Row], seed: int, num_held_out: int = 100) -> tuple[list[Row], list[Row]]:
    """The rows to train on, in any order, and those held out."""
    rows = random.Random(seed).sample(rows, len(rows))
    return rows[num_held_out:], rows[:num_held_out]


def write_all(out: Path, seed: int) -> None:
    """Write the four files."""
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sums", sums()), ("plus_minus", plus_minus())):
        for side, some in zip(("", "_held_out"), split(rows, seed), strict=True):
            (out / f"{name}{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The problems of the example.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2/data"))
    chosen = parser.parse_args()
    write_all(chosen.out, chosen.seed)
    print(f"problems: {chosen.out}")
