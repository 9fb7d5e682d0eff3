from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from whet.core.advantages import (
    best_of_group,
    group_advantages,
    group_sizes,
    leave_one_out,
    length_weighted,
    mean_normalized,
    nothing_to_compare,
    scaled_by_nonzero,
)

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


def by_definition(rollout, estimate):
    """Each sample's advantage by a function of (own score, the valid siblings' scores with it, all valid scores)."""
    everything = [r for _, r, v, _ in rollout if v]
    expected = []
    for group, reward, valid, num_samples in rollout:
        siblings = [r for g, r, v, _ in rollout if g == group and v]
        advantage = estimate(reward, siblings, everything) if valid and len(siblings) >= 2 else 0.0
        expected += [advantage] * num_samples
    return torch.tensor(expected, dtype=torch.float64)


def gpg_scale(everything):
    return len(everything) / max(sum(r != 0 for r in everything), 1)


DEFINITIONS = {
    "rloo": (leave_one_out, lambda r, s, _: r - (sum(s) - r) / (len(s) - 1)),
    "gpg": (scaled_by_nonzero, lambda r, s, e: gpg_scale(e) * (r - statistics.fmean(s))),
    "passk": (
        lambda b: best_of_group(b, normalize_std=False),
        lambda r, s, _: r - sorted(s)[-2] if r == max(s) and s.count(r) == 1 else 0.0,
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
@given(rollout=rollouts())
def test_group_estimators_agree_with_their_definitions(name, rollout):
    estimator, definition = DEFINITIONS[name]
    found = estimator(batch_from(rollout))
    torch.testing.assert_close(found, by_definition(rollout, definition), rtol=1e-7, atol=1e-7)


@given(rollouts())
def test_maxrl_divides_by_the_mean(rollout):
    rollout = [(g, abs(r), v, n) for g, r, v, n in rollout]
    found = mean_normalized(batch_from(rollout))
    expected = by_definition(rollout, lambda r, s, _: r / m - 1 if (m := statistics.fmean(s)) > 1e-6 else 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_maxrl_refuses_negative_scores():
    with pytest.raises(ValueError, match=r"one is -1\.0"):
        mean_normalized(batch_from([(0, -1.0, True, 1), (0, 1.0, True, 1)]))


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), min_size=2, max_size=6))
def test_opo_weighs_the_baseline_by_trained_tokens(members):
    b = batch(*(sample("." + "#" * n, trajectory=str(i), reward=r) for i, (n, r) in enumerate(members)))
    total = sum(n for n, _ in members)
    baseline = sum(n * r for n, r in members) / total if total else 0.0
    assert length_weighted(b).tolist() == pytest.approx([r - baseline for _, r in members], abs=1e-9)


def test_a_trajectorys_length_is_that_of_all_its_samples():
    b = batch(sample(".#", reward=3.0), sample(".###", order=1, reward=3.0), sample(".#", trajectory="u", reward=0.0))
    assert length_weighted(b).tolist() == pytest.approx([0.6, 0.6, -2.4])


@pytest.mark.parametrize("estimator", [group_advantages, leave_one_out, length_weighted, scaled_by_nonzero])
def test_what_a_group_of_one_gets(estimator):
    b = batch_from([(0, 3.0, True, 2), (0, 5.0, False, 1), (1, 1.0, True, 1), (1, 2.0, True, 1)])
    assert estimator(b)[:3].tolist() == [0.0] * 3
    assert estimator(b, singleton="raw")[:3].tolist() == [3.0, 3.0, 0.0]
    with pytest.raises(ValueError, match="compares at least two"):
        estimator(b, singleton="refuse")
    assert estimator(b, singleton="raw")[3:].tolist() == estimator(b)[3:].tolist()


def test_token_rewards_count_in_a_score():
    b = batch_from([(0, 1.0, True, 1), (0, 0.0, True, 1)]).with_(token_rewards=torch.tensor([0.0, -0.5, 0.0, 0.5]))
    assert group_advantages(b, normalize_std=False).tolist() == [0.0, 0.0]


def test_a_floor_for_the_std():
    rollout = [(0, 1.0, True, 1), (0, 1.0 + 1e-5, True, 1)]
    assert group_advantages(batch_from(rollout), std_floor=1e-3)[1].item() == pytest.approx(5e-6 / (1e-3 + EPS))


def test_why_a_group_teaches_nothing():
    assert nothing_to_compare([1.0, 0.0]) is None
    assert nothing_to_compare([1, 1, 1]) == "zero_std_1"
    assert nothing_to_compare([0.34, 0.34]) == "zero_std_0.3"
    assert nothing_to_compare([0.0, 1e-7, 0.0]) == "zero_std_0.0"
    assert nothing_to_compare([2.0]) == "zero_std_2.0"
