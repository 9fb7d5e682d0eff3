"""From trajectories to samples: unbroken chains of turns, and a mask that is what was sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.core.advantages import group_advantages
from whet.core.batch import batch_of
from whet.core.weights import sample_mean, token_sum_mean
from whet.rollout.samples import samples_of, samples_of_groups
from whet.types import UNSAMPLED, Finish, Group, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn

TASK = Task("t", "q")


def turn(context, tokens, origin=Origin.ENVIRONMENT, restart=False):
    return Turn(
        context=tuple(context),
        context_origin=(origin,) * len(context),
        tokens=tuple(tokens),
        logprobs=tuple(-float(token) for token in tokens),
        versions=tuple(token % 3 for token in tokens),
        message=Message("assistant", ""),
        finish=Finish.STOP,
        restart=restart,
    )


def trajectory(*turns, outcome=Outcome.COMPLETED):
    return Trajectory("t/0", TASK, turns, outcome, Rewards(0.5), temperature=0.7)


IDS = st.lists(st.integers(0, 50), min_size=1, max_size=4)
TURNS = st.lists(st.tuples(IDS, IDS, st.booleans()), min_size=1, max_size=6)


@given(TURNS)
def test_samples_hold_every_token_once_and_train_what_was_sampled(parts):
    turns = [turn(context, tokens, restart=restart) for context, tokens, restart in parts]
    samples = samples_of(trajectory(*turns))
    assert len(samples) == 1 + sum(restart for _, _, restart in parts[1:])
    assert [sample.order for sample in samples] == list(range(len(samples)))
    flat = [
        (token, trains, logprob, version)
        for s in samples
        for token, trains, logprob, version in zip(s.tokens, s.loss_mask, s.logprobs, s.versions, strict=True)
    ]
    expected = []
    for context, tokens, _ in parts:
        expected += [(token, False, 0.0, UNSAMPLED) for token in context]
        expected += [(token, True, -float(token), token % 3) for token in tokens]
    assert flat == expected


def test_a_restart_starts_a_new_sample():
    first, second, third = turn([1], [2], Origin.PROMPT), turn([3], [4]), turn([5, 6], [7], Origin.PROMPT, restart=True)
    one, two = samples_of(trajectory(first, second, third))
    assert (one.tokens, one.origin, one.order) == ((1, 2, 3, 4), (0, 1, 2, 1), 0)
    assert (two.tokens, two.origin, two.order) == ((5, 6, 7), (0, 0, 1), 1)
    assert one.trajectory == two.trajectory == "t/0" and one.group == two.group == "t"
    assert (two.reward, two.temperature, two.valid) == (0.5, 0.7, True)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_valid_outcomes_with_a_reward_count(outcome):
    whole = trajectory(turn([1], [2]), outcome=outcome)
    (sample,) = samples_of(whole)
    assert sample.valid == (outcome in (Outcome.COMPLETED, Outcome.TRUNCATED))
    assert sample.truncated == (outcome is Outcome.TRUNCATED)
    (unscored,) = samples_of(replace(whole, rewards=None))
    assert (unscored.valid, unscored.reward) == (False, 0.0)


def test_groups_are_flattened_in_order():
    a, b = (replace(trajectory(turn([1], [n])), id=f"t/{n}") for n in (2, 3))
    empty = Trajectory("t/4", TASK, (), Outcome.TIMEOUT)
    samples = samples_of_groups([Group(TASK, (a, empty)), Group(TASK, (b,))])
    assert [sample.trajectory for sample in samples] == ["t/2", "t/3"]


def test_rewards_of_single_tokens_stay_on_their_tokens():
    first, second = turn([1], [2, 3], Origin.PROMPT), replace(turn([4], [5]), token_rewards=(0.25,))
    (sample,) = samples_of(trajectory(first, second))
    assert sample.token_rewards == (0.0, 0.0, 0.0, 0.0, 0.25)
    (plain,) = samples_of(trajectory(first))
    assert plain.token_rewards is None


def test_on_request_what_stands_between_the_turns_trains_too():
    turns = (turn([1], [2], Origin.PROMPT), turn([3, 8], [4]), turn([5, 6], [7], Origin.PROMPT, restart=True), turn([9], [9]))
    one, two = samples_of(trajectory(*turns), "all")
    assert (one.tokens, one.loss_mask) == ((1, 2, 3, 8, 4), (False, True, True, True, True))
    assert (two.tokens, two.loss_mask) == ((5, 6, 7, 9, 9), (False, False, True, True, True)), "a rewritten history is context"
    plain = samples_of(trajectory(*turns))
    assert [replace(sample, loss_mask=other.loss_mask) for sample, other in zip(plain, (one, two), strict=True)] == [one, two]


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_however_often_a_trajectory_restarts_it_counts_once(lengths):
    """A trajectory cut into many samples weighs as much as one in a single chain, and is one sibling of its group."""
    chains = [[turn([1], [5] * n, Origin.PROMPT, restart=True) for n in lengths], [turn([1], [5] * sum(lengths), Origin.PROMPT)]]
    played = [replace(trajectory(*turns), id=f"t/{k}", rewards=Rewards(float(k))) for k, turns in enumerate(chains)]
    batch = batch_of(samples_of_groups([Group(TASK, tuple(played))]))
    assert batch.num_samples == len(lengths) + 1
    cut = batch.trajectory == 0
    tokens = cut.repeat_interleave(batch.lengths)
    for reducer, each in ((sample_mean, 0.5), (token_sum_mean, sum(lengths) / 2)):
        weights = reducer(batch)
        assert weights[tokens].sum().item() == pytest.approx(each) == weights[~tokens].sum().item()
    credit = group_advantages(batch)
    assert set(credit[cut].tolist()) == {-credit[~cut].item()}
