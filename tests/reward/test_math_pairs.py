"""The table of answers that the reward `math` has to call right or wrong."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.reward.reward_samples import make_trajectory
from whet.reward import LabelError, RewardConfig, build_reward

ROWS = [
    tuple(line.split("\t"))
    for line in (Path(__file__).parent / "math_pairs.tsv").read_text().splitlines()
    if not line.startswith("#")
]
FAMILIES = sorted({(verdict, family) for verdict, family, _, _ in ROWS})


@pytest.fixture(scope="module")
def math_reward():
    reward = build_reward(RewardConfig(name="math", timeout_s=30))
    yield reward
    reward.close()


def test_the_table_is_large_and_has_both_verdicts():
    counts = Counter(verdict for verdict, _, _, _ in ROWS)
    assert counts["right"] >= 250 and counts["wrong"] >= 250


@pytest.mark.parametrize(("verdict", "family"), FAMILIES, ids=lambda value: value.replace(" ", "_"))
def test_a_family_of_answers(math_reward, verdict, family):
    missed = []
    for label, answer in ((row[2], row[3]) for row in ROWS if row[:2] == (verdict, family)):
        try:
            found = asyncio.run(math_reward(make_trajectory(rf"So \boxed{{{answer}}}.", label)))
        except LabelError as error:
            missed.append(f"{label!r}: {error}")
            continue
        if found.total != (verdict == "right"):
            missed.append(f"{label!r}, {answer!r}: {found.total}")
        assert found.total == 1.0 or found.detail
    assert not missed
