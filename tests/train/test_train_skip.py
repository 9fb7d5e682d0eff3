"""Samples without a gradient are left out of an update's passes: the gradient and the step stay what they are."""

from __future__ import annotations

import pytest
import torch
from pydantic import Field

from tests.train.tiny_policy import gradients, policy, relative, rollout_samples, trajectory
from whet.algo.base import LossTerms, Need, StepPlan
from whet.algo.config import AlgorithmConfig, GRPOConfig
from whet.algo.policy import PolicyGradient
from whet.algo.table import ALGORITHMS, build_algorithm
from whet.config import Config
from whet.core.advantages import group_advantages, leave_one_out, length_weighted
from whet.core.batch import batch_of
from whet.observe.metrics import flatten
from whet.train.batching import BatchPlan
from whet.train.learners import Learners, Models
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Progress


class Recorded(TorchBackend):
    """Keeps the gradients, and the samples that it computed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.grads, self.computed = [], []

    def forward_backward(self, batch, loss, *, entropy_grad=False, per_token=False):
        found = super().forward_backward(batch, loss, entropy_grad=entropy_grad, per_token=per_token)
        self.grads.append(gradients(self.model))
        self.computed.append(batch)
        return found


def flat(group, reward, *masks):
    """A group whose trajectories have one reward."""
    return [s for i, mask in enumerate(masks) for s in trajectory(group, i, [mask], reward=reward)]


SAMPLES = [*rollout_samples(), *flat("f", 0.1, "...###", "...##e#", "...####"), *flat("g", 1.0, "..#", "..###")]
NUM_FLAT = sum(sum(s.loss_mask) for s in SAMPLES if s.group in "fg")


class Settings(Config):
    algo: AlgorithmConfig = Field(default_factory=GRPOConfig)


def update(name, skip, samples=SAMPLES, steps=1, **settings):
    config = Settings.model_validate({"algo": {"name": name, **settings}}).algo
    algorithm = build_algorithm(config, StepPlan(steps, samples_per_prompt=3, max_tokens=16))
    backend = Recorded(policy("float64"), TrainConfig(max_tokens_per_device=40), 10)
    plan = BatchPlan(
        prompts_per_rollout=5, samples_per_prompt=3, samples_per_step=15, steps_per_rollout=steps, epochs=1, skip_zero_advantage=skip
    )
    reference = TorchBackend(policy("float64", seed=1), TrainConfig(max_tokens_per_device=40), None)
    learners = Learners(Models(backend, reference), algorithm, plan, seed=2)
    batch = batch_of(samples)
    if name == "maxrl":  # for scores that are not negative
        batch = batch.with_(rewards=batch.rewards.clamp(min=0.0))
    if Need.BASELINE in algorithm.needs:
        batch = batch.with_(baseline=batch.rewards.clone())
        batch.baseline[: len(batch.baseline) // 2] += 0.5
    if Need.VALUES in algorithm.needs:
        noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(3))
        batch = batch.with_(values=noise, scores=noise)
        algorithm.needs = algorithm.needs - {Need.VALUES, Need.SCORES}
    batch, _ = algorithm.assign_credit(learners.annotate(batch))
    done = learners.update(batch, Progress())
    return done, backend, batch


@pytest.mark.parametrize("extra", [{}, {"entropy_coef": 0.01}, {"kl_coef": 0.1}], ids=["plain", "entropy", "kl"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_is_that_of_all_samples(name, extra):
    done, backend, batch = update(name, True, **extra)
    all_done, all_backend, _ = update(name, False, **extra)
    for found, expected in zip(backend.grads, all_backend.grads, strict=True):
        assert found.keys() == expected.keys()
        assert all(relative(found[key], expected[key]) < 1e-6 for key in found)
    values, all_values = flatten(done.metrics), flatten(all_done.metrics)
    assert values["policy/loss"] == pytest.approx(all_values["policy/loss"], rel=1e-6, abs=1e-12)
    assert values["optim/grad_norm"] == pytest.approx(all_values["optim/grad_norm"], rel=1e-6)
    assert all_values["train/skipped"] == 0
    zero = torch.zeros(batch.num_samples).index_add(0, batch.sample_of_token, batch.advantages.abs()) == 0
    without = sum(int(n) for n, none in zip(batch.ragged(batch.loss_mask), zero, strict=True) if none for n in [sum(n)])
    expected = 0 if extra else without / int(batch.loss_mask.sum())
    assert values["train/skipped"] == pytest.approx(expected)


def test_flat_groups_are_left_out_and_their_logprobs_are_unknown():
    done, backend, batch = update("grpo", True)
    (seen,) = backend.computed
    flat_samples = [i for i, s in enumerate(SAMPLES) if s.group in "fg"]
    assert seen.num_tokens == batch.num_tokens - sum(
        int(batch.lengths[i]) for i in range(batch.num_samples) if i in flat_samples or not any(batch.ragged(batch.loss_mask)[i])
    )
    unknown = done.train_logprobs.isnan()
    assert torch.equal(unknown, batch.loss_mask & torch.isin(batch.sample_of_token, torch.tensor(flat_samples)))
    everything, _, _ = update("grpo", False)
    assert torch.allclose(done.train_logprobs[~unknown], everything.train_logprobs[~unknown], rtol=0, atol=1e-6)
    assert bool((everything.train_logprobs[unknown] < 0).all())
    assert flatten(done.metrics)["train/skipped"] == pytest.approx(NUM_FLAT / int(batch.loss_mask.sum()))


def test_a_loss_of_ones_own_is_computed_for_every_sample():
    def replaced(algorithm):
        inner = algorithm.loss
        algorithm.loss = lambda batch, out: LossTerms(inner(batch, out).terms - out.logprobs, {})

    class Own(PolicyGradient):
        def parts(self, batch, out):
            return super().parts(batch, out)

    def derived(algorithm):
        algorithm.__class__ = Own

    for change in (replaced, derived):
        algorithm = build_algorithm(GRPOConfig(), StepPlan(1, samples_per_prompt=3))
        batch, _ = algorithm.assign_credit(batch_of(SAMPLES))
        batch = batch.with_(weights=algorithm.reducer(batch))
        assert not torch.equal(algorithm.has_gradient(batch), batch.loss_mask)
        change(algorithm)
        assert torch.equal(algorithm.has_gradient(batch), batch.loss_mask)


def test_a_step_of_flat_groups_alone_is_still_a_step():
    samples = [*flat("f", 0.1, "...###", "...##e#", "...####")]
    _, backend, _ = update("grpo", True, samples)
    (seen,) = backend.computed
    assert seen.lengths.tolist() == [6]
    assert all(not bool(grad.any()) for grad in backend.grads[0].values()) and backend.grads[0]
    _, everything, _ = update("grpo", False, samples)
    for (name, one), (_, other) in zip(backend.named_weights(), everything.named_weights(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("steps", [1, 2])
def test_several_steps_keep_the_old_logprobs_of_all(steps):
    done, _, batch = update("grpo", True, steps=steps, old_logprobs="recompute")
    assert torch.equal(done.train_logprobs, batch.old_logprobs)


@pytest.mark.parametrize("estimate", [group_advantages, leave_one_out, length_weighted])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e-9, 123456.789])
@pytest.mark.parametrize("size", [3, 7, 8, 10])
def test_equal_rewards_have_an_advantage_of_exactly_zero(estimate, reward, size):
    samples = flat("f", reward, *("." + "#" * (i + 1) for i in range(size)))
    assert not bool(estimate(batch_of(samples)).any())
