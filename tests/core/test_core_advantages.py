from __future__ import annotations

import statistics

import pytest
import torch
from core_batches import batch, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.core.advantages import group_advantages, group_sizes

EPS = 1e-6


@st.composite
def rollouts(draw):
    """(group, reward, valid, samples) of each trajectory."""
    rewards = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-5, 5))
    trajectory = st.tuples(st.integers(0, 2), rewards, st.booleans(), st.integers(1, 3))
    return draw(st.lists(trajectory, min_size=1, max_size=9))


def batch_from(rollout):
    return batch(
        *(
            sample(".#", group=str(group), trajectory=str(i), reward=reward, valid=valid, order=order)
            for i, (group, reward, valid, num_samples) in enumerate(rollout)
            for order in range(num_samples)
        )
    )


@settings(max_examples=60, deadline=None)
@given(rollouts(), st.booleans())
def test_group_advantages_agree_with_the_definition(rollout, normalize_std):
    expected = []
    for group, reward, valid, num_samples in rollout:
        siblings = [r for g, r, v, _ in rollout if g == group and v]
        advantage = 0.0
        if valid and len(siblings) >= 2:
            advantage = reward - statistics.fmean(siblings)
            if normalize_std:
                advantage /= statistics.stdev(siblings) + EPS
        expected += [advantage] * num_samples
    found = group_advantages(batch_from(rollout), normalize_std=normalize_std)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(rollouts())
def test_group_sizes_count_valid_trajectories_once(rollout):
    names = list(dict.fromkeys(group for group, *_ in rollout))
    expected = [sum(1 for g, _, v, _ in rollout if g == name and v) for name in names]
    assert group_sizes(batch_from(rollout)).tolist() == expected


def test_a_failed_sibling_leaves_the_statistics():
    rollout = [(0, 1.0, True, 1), (0, 0.0, True, 1), (0, 100.0, False, 1)]
    half = 0.5 / (statistics.stdev([1.0, 0.0]) + EPS)
    assert group_advantages(batch_from(rollout)).tolist() == pytest.approx([half, -half, 0.0])


def test_a_group_with_one_valid_member_teaches_nothing():
    rollout = [(0, 1.0, True, 2), (0, 5.0, False, 1), (1, 3.0, True, 1)]
    for normalize_std in (True, False):
        assert group_advantages(batch_from(rollout), normalize_std=normalize_std).tolist() == [0.0] * 4


def test_a_trajectory_in_three_samples_weighs_as_much_as_one_in_one():
    rollout = [(0, 1.0, True, 3), (0, 0.0, True, 1), (0, 0.0, True, 1)]
    found = group_advantages(batch_from(rollout), normalize_std=False)
    assert found.tolist() == pytest.approx([2 / 3] * 3 + [-1 / 3] * 2)


def test_equal_rewards_give_zero_even_where_their_mean_rounds():
    rollout = [(0, 0.1, True, 1)] * 3
    assert group_advantages(batch_from(rollout)).abs().max().item() < 1e-9
