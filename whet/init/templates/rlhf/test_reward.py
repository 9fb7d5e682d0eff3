"""Tests of the preference: python -m pytest"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reward import polite

PAIRS = [json.loads(line) for line in Path(__file__).with_name("pairs.jsonl").read_text().splitlines()]


def replied(text: str) -> Any:
    """A trajectory with this reply."""
    return SimpleNamespace(response=text)


def test_of_every_pair_the_chosen_reply_is_the_polite_one() -> None:
    assert len(PAIRS) == 20
    for pair in PAIRS:
        assert [polite(replied(pair[side])) for side in ("chosen", "rejected")] == [1, -1]


def test_what_is_neither_counts_nothing() -> None:
    assert polite(replied("At nine.")) == 0
