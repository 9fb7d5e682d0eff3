"""Tests of the reward: python -m pytest"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reward import score

ROWS = [json.loads(line) for line in Path(__file__).with_name("rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("reply", "right", "number"), [("It is 12.", 1, 0.1), ("12 or 13", 0, 0.1), ("Twelve.", 0, 0)])
def test_only_the_last_number_counts(reply: str, right: float, number: float) -> None:
    trajectory: Any = SimpleNamespace(response=reply, task=SimpleNamespace(label="12"))
    assert score(trajectory) == {"right": right, "number": number}


def test_every_row_has_a_number_as_its_label() -> None:
    assert len(ROWS) == 20 and all(row["label"].isdigit() and row["prompt"] for row in ROWS)
