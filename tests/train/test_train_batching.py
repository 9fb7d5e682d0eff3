from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.train.tiny_policy import trajectory
from whet.core.batch import batch_of
from whet.train.batching import BatchConfig, BatchPlan, due, plan_batch
from whet.train.learners import steps_of

NAMES = ("prompts_per_rollout", "samples_per_prompt", "samples_per_step", "steps_per_rollout")


def sizes(plan: BatchPlan) -> tuple[int, ...]:
    return tuple(getattr(plan, name) for name in NAMES)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.sampled_from(NAMES))
def test_any_one_that_is_left_out_is_derived(prompts, samples, steps, missing):
    assume(prompts * samples % steps == 0)
    whole = dict(zip(NAMES, (prompts, samples, prompts * samples // steps, steps), strict=True))
    assert sizes(plan_batch(BatchConfig(**whole))) == tuple(whole.values())
    assert sizes(plan_batch(BatchConfig(**{k: v for k, v in whole.items() if k != missing}))) == tuple(whole.values())


@pytest.mark.parametrize(
    ("given_", "solved"),
    [
        ({"prompts_per_rollout": 8, "samples_per_prompt": 4}, (8, 4, 32, 1)),
        ({"prompts_per_rollout": 8, "samples_per_step": 32}, (8, 4, 32, 1)),
        ({"samples_per_prompt": 4, "samples_per_step": 32}, (8, 4, 32, 1)),
        ({"samples_per_step": 16, "steps_per_rollout": 2}, (32, 1, 16, 2)),
        ({"prompts_per_rollout": 8, "steps_per_rollout": 2}, (8, 1, 4, 2)),
        ({"prompts_per_rollout": 8}, (8, 1, 8, 1)),
        ({"samples_per_step": 8}, (8, 1, 8, 1)),
    ],
)
def test_usual_values_fill_in_before_the_equation_is_solved(given_, solved):
    assert sizes(plan_batch(BatchConfig(**given_))) == solved


def test_epochs_multiply_the_optimizer_steps():
    plan = plan_batch(BatchConfig(prompts_per_rollout=4, samples_per_prompt=4, steps_per_rollout=2, epochs=3))
    assert plan.samples_per_step == 8 and plan.optimizer_steps == 6


def test_a_contradiction_shows_the_equation_with_its_numbers():
    with pytest.raises(ValueError) as caught:
        plan_batch(BatchConfig(prompts_per_rollout=8, samples_per_prompt=4, samples_per_step=10, steps_per_rollout=3))
    text = str(caught.value)
    assert "contradict" in text and "but 32 is not 30" in text
    assert (
        "prompts_per_rollout (8) x samples_per_prompt (4) = samples_per_step (10) x steps_per_rollout (3)" in text
    )


def test_a_fraction_is_named():
    with pytest.raises(ValueError, match=r"samples_per_step would be 32/3, no whole number.*samples_per_step \(\?\)"):
        plan_batch(BatchConfig(prompts_per_rollout=8, samples_per_prompt=4, steps_per_rollout=3))


@pytest.mark.parametrize("given_", [{}, {"samples_per_prompt": 8}, {"steps_per_rollout": 2, "samples_per_prompt": 8}])
def test_what_cannot_be_derived_is_named(given_):
    with pytest.raises(ValueError, match=r"cannot derive prompts_per_rollout and samples_per_step; set one of them"):
        plan_batch(BatchConfig(**given_))


def test_sizes_are_positive():
    with pytest.raises(ValueError, match="samples_per_step"):
        BatchConfig(samples_per_step=0)


def rollout(samples_of_each: list[int]):
    """Trajectories with the given numbers of samples, interleaved so that siblings are not neighbours."""
    found = [
        sample
        for i, count in enumerate(samples_of_each)
        for sample in trajectory("g", i, [".#" + "#" * (i % 3)] * count, reward=float(i))
    ]
    return batch_of(sorted(found, key=lambda s: s.order))


def plan(steps: int, epochs: int = 1) -> BatchPlan:
    return BatchPlan(prompts_per_rollout=1, samples_per_prompt=1, samples_per_step=1, steps_per_rollout=steps, epochs=epochs)


def identities(batch):
    """(trajectory, order) of each sample."""
    return list(zip(batch.trajectory.tolist(), batch.order.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**40))
def test_every_sample_once_per_epoch_and_siblings_together(samples_of_each, steps, epochs, seed):
    batch = rollout(samples_of_each)
    cut = list(steps_of(batch, plan(steps, epochs), seed))
    per_epoch = min(steps, len(samples_of_each))
    assert len(cut) == per_epoch * epochs
    for epoch in range(epochs):
        parts = cut[epoch * per_epoch : (epoch + 1) * per_epoch]
        found = [identity for part in parts for identity in identities(part)]
        assert sorted(found) == sorted(identities(batch))
        owners = [set(part.trajectory.tolist()) for part in parts]
        assert sum(map(len, owners)) == len(samples_of_each), "a trajectory is in two steps"
        assert max(map(len, owners)) - min(map(len, owners)) <= 1


def test_columns_follow_their_samples():
    batch = rollout([1, 2, 1, 1])
    tokens = dict(zip(identities(batch), batch.ragged(batch.tokens), strict=True))
    for part in steps_of(batch, plan(2), seed=5):
        assert [tokens[i] for i in identities(part)] == part.ragged(part.tokens)


def test_a_single_step_is_the_batch_as_it_is():
    batch = rollout([2, 1, 2])
    assert list(steps_of(batch, plan(1), seed=3)) == [batch]


def test_epochs_and_seeds_shuffle_anew_and_a_seed_repeats_itself():
    batch = rollout([1] * 12)
    first, again, other = (
        [part.trajectory.tolist() for part in steps_of(batch, plan(2, 3), seed)] for seed in (1, 1, 2)
    )
    assert first == again and first != other
    epochs = [first[0] + first[1], first[2] + first[3], first[4] + first[5]]
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_epochs_over_one_step_reorder_without_loss():
    batch = rollout([1, 1, 1, 1, 1])
    cut = list(steps_of(batch, plan(1, 2), seed=0))
    assert [sorted(part.trajectory.tolist()) for part in cut] == [list(range(5))] * 2


@pytest.mark.parametrize(
    ("done", "total", "interval", "expected"),
    [(0, 9, 3, False), (3, 9, 3, True), (4, 9, 3, False), (8, 9, 3, False), (9, 9, 4, True), (3, 9, None, False), (9, 9, None, True)],
)
def test_what_recurs_is_due_at_its_interval_and_at_the_end(done, total, interval, expected):
    assert due(done, total, interval) is expected
