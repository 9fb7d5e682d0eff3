"""Rows that a reward cannot score are known before anything is sampled: each built-in reward reads its rows there as it does in the run."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.reward.reward_samples import make_trajectory
from whet.reward import LabelError, RewardConfig, build_reward
from whet.reward.build import REWARDS
from whet.reward.labels import READERS, SHOWN, text_of_faults, unusable_rows
from whet.types import Task

ANY_ROW = ("overlong", "environment", "reasoning_gym", "roles", "random", "model", "remote")
"""These want nothing of a row, or nobody knows beforehand."""
CRITERIA = {"criteria": [{"text": "is short"}]}
GOOD: dict[str, Task] = {
    "ifeval": Task("t", (), metadata={"instruction_id_list": ["punctuation:no_comma"]}),
    "rubric": Task("t", (), metadata=CRITERIA),
    "dispatch": Task("t", (), "1", {"rm_type": "math"}),
}
BAD: dict[str, list[Task]] = {
    "math": [Task("t", (), ""), Task("t", (), r"\sum_{i=1}^n i"), Task("t", (), "(x+1"), Task("t", (), "9^{9^9}")],
    "math_verify": [Task("t", (), r"\overline{AB}")],
    "search_em": [Task("t", (), "x", {"target": [1]})],
    "gpqa": [Task("t", (), "A", {"choices": 3})],
    "ifeval": [Task("t", (), metadata={"instruction_id_list": ["no:such"]})],
    "slime_dapo": [Task("t", (), "a word")],
    "rubric": [Task("t", (), metadata={"criteria": [{"txt": "x"}]})],
    "dispatch": [Task("t", (), "1", {"rm_type": "no such"}), Task("t", (), None, {"rm_type": "boxed_math"})],
}
OPTIONS = {"rubric": {"base_url": "http://127.0.0.1:1/v1", "model": "judge"}}


def faults(name: str, *tasks: Task) -> list[str]:
    return asyncio.run(unusable_rows(RewardConfig(name=name, options=OPTIONS.get(name, {})), tasks))


def test_every_built_in_reward_reads_its_rows_or_is_known_to_want_nothing():
    assert {*READERS, *ANY_ROW} == set(REWARDS)


@pytest.mark.parametrize("name", READERS)
def test_a_row_that_a_reward_cannot_score_is_found_beforehand(name):
    good = GOOD.get(name, Task("t", (), "1"))
    bad = [Task("t", ()), *BAD.get(name, [])]
    assert faults(name, good) == []
    assert len(faults(name, good, *bad)) == len(bad)


@pytest.mark.parametrize("name", [name for name in READERS if name not in OPTIONS])
def test_what_is_found_beforehand_is_what_the_reward_would_refuse(name):
    """The reward itself, asked about a reply, raises for the same rows and for no other."""
    reward = build_reward(RewardConfig(name=name))
    try:
        for task in [GOOD.get(name, Task("t", (), "1")), Task("t", ()), *BAD.get(name, [])]:
            reply = dataclasses.replace(make_trajectory(r"So it is \boxed{\frac{x}{2}}"), task=task)
            try:
                asyncio.run(reward(reply))
                refused = False
            except LabelError:
                refused = True
            assert bool(faults(name, task)) == refused, task
    finally:
        reward.close()


def test_each_part_of_a_sum_reads_its_rows_and_a_function_of_the_users_none():
    names = {"a": "math", "b": "mine.py:score", "c": "slime_dapo"}
    config = RewardConfig.model_validate({"components": {part: {"name": name} for part, name in names.items()}})
    found = asyncio.run(unusable_rows(config, [Task("t/0", (), "1"), Task("t/1", (), "x"), Task("t/2", (), None)]))
    assert [text.split(" ")[1].strip("':") for text in found] == ["t/1", "t/2"]


def test_the_first_few_are_quoted():
    assert text_of_faults("of training", ["task 'a' has none"], 9) == "task 'a' has none"
    text = text_of_faults("of training", [f"task {i}" for i in range(SHOWN + 2)], 9)
    assert text.startswith("7 of the 9 rows of training cannot be scored:\n  task 0\n") and text.endswith("\n  and 2 more")
