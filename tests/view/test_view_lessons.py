"""The worked examples: their numbers are those of the formulas, again in float64 from the records."""

from __future__ import annotations

import math

import numpy as np
import pytest

from whet.observe.records import read_records
from whet.view.lessons import LESSONS
from whet.view.lessons.research import CRITERIA


def rows_of(lessons, name):
    rows = read_records(lessons / name / "rollouts")
    for row in rows:
        row["trains"] = np.array([weight is not None for weight in row["first_weights"]])
        for key in ("values", "advantages", "kl_rewards", "td_errors", "old_logprobs", "ref_logprobs", "last_logprobs", "last_ratio"):
            if row[key] is not None:
                row[key] = np.array([np.nan if x is None else x for x in row[key]], np.float64)[row["trains"]]
    return rows


def test_every_lesson_has_words_in_both_languages():
    for examples in LESSONS.values():
        for example in examples.values():
            texts = [example.words["title"], *example.words["text"], *(stop["words"] for stop in example.words["stops"])]
            assert all(set(text) == {"en", "zh"} and text["en"] and text["zh"] for text in texts)


def test_stops_are_tokens_that_are_there(lessons):
    for examples in LESSONS.values():
        for name, example in examples.items():
            rows = {row["trajectory"]: row for row in rows_of(lessons, name)}
            for stop in example.words["stops"]:
                row = rows[stop["at"]["trajectory"]]
                assert 0 <= stop["at"].get("token", 0) < len(row["tokens"])


def test_the_report_is_of_six_steps_and_285_trained_tokens(lessons):
    careful, credulous = rows_of(lessons, "research")
    assert (len(careful["turns"]), careful["trains"].sum(), careful["reward"]) == (6, 285, 2.5)
    weights = {each.name: each.weight for each in CRITERIA}
    for row, reward in ((careful, 2.5), (credulous, 0.25)):
        assert row["reward"] == reward == sum(weights[name] * share for name, share in row["reward_components"].items())
    assert credulous["reward_detail"].endswith("right: not; sources: not; useful: partly")
    assert {origin for origin, trains in zip(careful["origin"], careful["trains"], strict=True) if trains} == {1} and 2 in careful["origin"]


@pytest.mark.parametrize(
    ("name", "lam", "kl", "whitens"), [("one-plus-one-ppo", 0.95, 0, False), ("research", 0.98, 0, True), ("poem", 0.95, 0.1, True)]
)
def test_credit_with_a_critic(lessons, name, lam, kl, whitens):
    rows, found = rows_of(lessons, name), []
    for row in rows:
        rewards = np.zeros(row["trains"].sum())
        if kl:
            rewards -= kl * (row["old_logprobs"] - row["ref_logprobs"])
        rewards[-1] += row["reward"]
        errors = rewards + np.append(row["values"][1:], 0) - row["values"]
        np.testing.assert_allclose(row["td_errors"], errors, atol=1e-6)
        advantages = np.zeros(len(errors) + 1)
        for t in reversed(range(len(errors))):
            advantages[t] = errors[t] + lam * advantages[t + 1]
        found.append(advantages[:-1])
    every = np.concatenate(found)
    for row, advantages in zip(rows, found, strict=True):
        expected = (advantages - every.mean()) / math.sqrt(every.var(ddof=1) + 1e-8) if whitens else advantages
        np.testing.assert_allclose(row["advantages"], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["one-plus-one-grpo", "two-prompts"])
def test_credit_without_a_critic(lessons, name):
    rows = rows_of(lessons, name)
    for row in rows:
        rewards = np.array([other["reward"] for other in rows if other["group"] == row["group"]])
        np.testing.assert_allclose(row["advantages"], (row["reward"] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), rtol=1e-5)
        np.testing.assert_allclose(row["last_ratio"], np.exp(row["last_logprobs"] - row["old_logprobs"]), rtol=1e-5)
    assert {1, 2} <= {code for row in rows for code in row["last_clip"] if code is not None}, "both bounds are seen"
