"""The reward `environment`: what the environment gave, in all or for each turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pydantic import ValidationError

from tests.reward.reward_samples import make_trajectory
from whet.reward import RewardConfig, RewardError, build_reward
from whet.reward.base import place_token_rewards
from whet.types import Outcome, TurnNote


def played(*rewards, outcome=Outcome.COMPLETED, notes=()):
    """A trajectory of two turns, with a reward for each."""
    made = make_trajectory("x")
    turns = tuple(replace(turn, reward=reward, notes=notes) for turn, reward in zip(made.turns, rewards, strict=True))
    return replace(made, turns=turns, outcome=outcome)


def scored(trajectory, **options):
    reward = build_reward(RewardConfig(name="environment", options=options))
    try:
        return asyncio.run(reward(trajectory))
    finally:
        reward.close()


def test_the_turns_rewards_are_added_up_or_the_last_one_counts():
    assert scored(played(0.25, 0.5)).total == 0.75
    assert scored(played(0.25, 0.5), how="last").total == 0.5
    assert scored(played(0.25, None), how="last").total == 0.25


def test_the_environment_s_numbers_are_components_and_a_tool_s_are_not():
    notes = (TurnNote(metrics={"won": 1.0}), TurnNote("search", {"hits": 3.0}))
    rewards = scored(played(0.25, 0.5, notes=notes))
    assert (rewards.total, rewards.components) == (0.75, {"environment": 0.75, "won": 1.0})


def test_each_turn_s_reward_is_of_its_last_token():
    trajectory = played(0.25, None)
    placed, rewards = place_token_rewards(trajectory, scored(trajectory, per_turn=True))
    assert rewards.total == 0.0
    assert [list(turn.token_rewards or ()) for turn in placed.turns] == [[0.0, 0.25], [0.0]]
    assert placed.token_reward == 0.25


def test_no_reward_is_no_zero_unless_the_run_s_limits_cut_it():
    with pytest.raises(RewardError, match=r"the environment gave no reward; choose a reward\.name"):
        scored(played(None, None))
    assert scored(played(None, None, outcome=Outcome.TRUNCATED)).total == 0.0
    with pytest.raises(RewardError, match="must be finite"):
        scored(played(float("nan"), 0.0))


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="per_turn gives every turn its own reward"):
        scored(played(0.0, 0.0), per_turn=True, how="last")
    with pytest.raises((ValueError, ValidationError), match="how"):
        scored(played(0.0, 0.0), how="first")
