"""Tests of the reward and the tool: python -m pytest"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reward import score
from tools import search

ROWS = [json.loads(line) for line in Path(__file__).with_name("rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("reply", "calls", "right", "searched"), [("It was Mira Voss.", (1,), 1, 0.1), ("Nobody.", (), 0, 0)])
def test_the_answer_and_a_search_count(reply: str, calls: tuple[int, ...], right: float, searched: float) -> None:
    turns = [SimpleNamespace(message=SimpleNamespace(tool_calls=calls))]
    trajectory: Any = SimpleNamespace(response=reply, turns=turns, task=SimpleNamespace(label="Mira Voss"))
    assert score(trajectory) == {"right": right, "searched": searched}


def test_the_search_finds_the_answer_to_every_row() -> None:
    assert len(ROWS) == 20 and all(row["label"] in search(**row["call"]) for row in ROWS)
    assert search("zebra") == "Nothing was found."
