from __future__ import annotations

import math

import pytest
import torch

from tests.algo.algo_batches import outputs, rollout
from whet.algo.base import Need, StepPlan
from whet.algo.config import GRPOConfig
from whet.algo.grpo import grpo
from whet.observe.metrics import flatten, merge_metrics

ROLLOUT = [
    ("a", 1.0, True, [".##", ".#"]),
    ("a", 0.0, True, [".#.##"]),
    ("a", 9.0, False, [".#"]),
    ("b", 2.0, True, [".##"]),
    ("b", 0.0, False, [".##"]),
    ("c", 1.0, True, [".#"]),
    ("c", 1.0, True, ["..##"]),
]


def built(num_steps=1, **settings):
    return grpo(GRPOConfig(**settings), StepPlan(num_steps))


def test_credit_reaches_the_trained_tokens_of_groups_that_can_be_compared():
    batch, metrics = built(normalize_std=False).assign_credit(rollout(*ROLLOUT))
    assert batch.ragged(batch.advantages) == [
        [0, 0.5, 0.5],
        [0, 0.5],
        [0, -0.5, 0, -0.5, -0.5],
        [0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [0, 0],
        [0, 0, 0, 0],
    ]
    assert batch.advantages.dtype == torch.float32
    assert batch.valid.tolist() == [True, True, True, False, False, False, True, True]
    assert batch.ragged(batch.loss_mask)[3:6] == [[False] * 2, [False] * 3, [False] * 3]
    assert batch.ragged(batch.loss_mask)[7] == [False, False, True, True]
    assert flatten(metrics) == {
        "groups/total": 3.0,
        "groups/too_small": 1.0,
        "groups/zero_variance": pytest.approx(1 / 3),
    }


def test_the_std_is_over_trajectories_not_samples():
    batch, _ = built().assign_credit(rollout(*ROLLOUT))
    expected = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert batch.advantages[1].item() == pytest.approx(expected)


def test_weights_after_credit_count_what_still_trains():
    algorithm = built(reducer="sample_mean")
    batch, _ = algorithm.assign_credit(rollout(*ROLLOUT))
    weights = batch.ragged(algorithm.reducer(batch))
    quarter = [pytest.approx(w) for w in (0, 1 / 12, 1 / 12)]
    assert weights[0] == quarter and weights[1] == quarter[:2]
    assert weights[3:6] == [[0, 0], [0, 0, 0], [0, 0, 0]]
    assert sum(map(sum, weights)) == pytest.approx(1)


def test_a_rollout_without_a_usable_group_trains_nothing():
    for trajectories in ([("a", 1.0, False, [".#"])] * 2, [("a", 1.0, True, [".#"]), ("b", 0.0, True, [".#"])]):
        batch, _ = built().assign_credit(rollout(*trajectories))
        assert not batch.loss_mask.any() and not batch.valid.any() and not batch.advantages.any()


@pytest.mark.parametrize(
    ("settings", "num_steps", "needs", "entropy_grad"),
    [
        ({}, 1, set(), False),
        ({}, 2, {Need.OLD_LOGPROBS}, False),
        ({"old_logprobs": "recompute"}, 1, {Need.OLD_LOGPROBS}, False),
        ({"old_logprobs": "rollout"}, 4, set(), False),
        ({"kl_coef": 0.1}, 1, {Need.REF_LOGPROBS}, False),
        ({"reference": True}, 2, {Need.REF_LOGPROBS, Need.OLD_LOGPROBS}, False),
        ({"entropy_coef": 0.01}, 1, set(), True),
    ],
)
def test_what_it_asks_for(settings, num_steps, needs, entropy_grad):
    algorithm = built(num_steps, **settings)
    assert algorithm.needs == needs and algorithm.entropy_grad == entropy_grad


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match=r"kl_coef is 0.1 but reference is false"):
        GRPOConfig(kl_coef=0.1, reference=False)
    with pytest.raises(ValueError, match=r"old_logprobs=current.*feeds 4; use recompute or rollout"):
        built(4, old_logprobs="current")
    with pytest.raises(ValueError, match="clip_dual"):
        GRPOConfig(clip_dual=1.0)


def reference_terms(batch, out, old, config, ref=None):
    """The loss of each trained token in Python floats, and its slopes by log-prob and entropy."""
    terms, slopes = [], []
    for i in range(batch.num_tokens):
        if not batch.loss_mask[i]:
            terms.append(0.0)
            slopes.append(0.0)
            continue
        logprob, advantage = float(out.logprobs[i].detach()), float(batch.advantages[i])
        ratio = math.exp(logprob - float(old[i]))
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        term, slope = -ratio * advantage, -ratio * advantage
        if -bounded * advantage > term:
            term, slope = -bounded * advantage, 0.0
        term -= config.entropy_coef * float(out.entropy[i].detach())
        if ref is not None:
            away = math.exp(float(ref[i]) - logprob)
            term += config.kl_coef * (away - 1 - math.log(away))
            slope += config.kl_coef * (1 - away)
        terms.append(term)
        slopes.append(slope)
    return torch.tensor(terms), torch.tensor(slopes)


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout", "current"])
def test_the_loss_is_clip_minus_entropy_plus_kl(old_logprobs):
    algorithm = built(
        1, clip_low=0.1, clip_high=0.3, entropy_coef=0.05, kl_coef=0.2, old_logprobs=old_logprobs, normalize_std=False
    )
    batch = rollout(*ROLLOUT)
    ref, recomputed = outputs(batch, 7).logprobs.detach(), outputs(batch, 9).logprobs.detach()
    batch = batch.with_(ref_logprobs=ref, old_logprobs=recomputed if old_logprobs == "recompute" else None)
    batch, _ = algorithm.assign_credit(batch)
    out = outputs(batch)
    old = {"recompute": recomputed, "rollout": batch.rollout_logprobs, "current": out.logprobs.detach()}[old_logprobs]
    found = algorithm.loss(batch, out)
    found.terms.sum().backward()
    terms, slopes = reference_terms(batch, out, old, algorithm.config, ref)
    mask = batch.loss_mask
    torch.testing.assert_close(found.terms.detach()[mask], terms[mask], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.logprobs.grad[mask], slopes[mask], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.entropy.grad[mask], torch.full_like(slopes[mask], -0.05))


def test_old_logprobs_that_were_not_annotated_are_missed():
    algorithm = built(2)
    batch, _ = algorithm.assign_credit(rollout(*ROLLOUT))
    with pytest.raises(AssertionError, match="old log-probs"):
        algorithm.loss(batch, outputs(batch))


def test_metrics_are_means_over_trained_tokens_however_the_batch_is_cut():
    algorithm = built(2, kl_coef=0.1, clip_low=0.1, clip_high=0.1)
    batch = rollout(*ROLLOUT)
    batch = batch.with_(ref_logprobs=outputs(batch, 3).logprobs.detach(), old_logprobs=outputs(batch, 8).logprobs.detach())
    batch, _ = algorithm.assign_credit(batch)
    out, mask = outputs(batch), batch.loss_mask
    whole = flatten(algorithm.loss(batch, out).metrics)
    parts = {}
    for samples in ([6, 0], [2], [7, 1]):
        part = batch.select(samples)
        places = torch.cat([torch.arange(batch.starts[i], batch.starts[i] + batch.lengths[i]) for i in samples])
        piece = type(out)(out.logprobs[places], out.entropy[places])
        parts = merge_metrics(parts, algorithm.loss(part, piece).metrics)
    assert flatten(parts) == pytest.approx(whole)
    ratio = (out.logprobs - batch.old_logprobs).detach().double()[mask].exp()
    advantages = batch.advantages[mask]
    clipped = ((ratio > 1.1) & (advantages > 0)) | ((ratio < 0.9) & (advantages < 0))
    assert 0 < clipped.double().mean() < 1
    assert whole["policy/entropy"] == pytest.approx(float(out.entropy.detach()[mask].mean()))
    assert whole["policy/ratio_max"] == pytest.approx(float(ratio.max()))
    assert whole["policy/clip_fraction"] == pytest.approx(float(clipped.double().mean()))
    assert whole["policy/kl_old"] == pytest.approx(float((1 / ratio - 1 + ratio.log()).mean()), rel=1e-4)
    away = (batch.ref_logprobs - out.logprobs).detach().double()[mask]
    assert whole["policy/kl_ref"] == pytest.approx(float((away.exp() - 1 - away).mean()), rel=1e-4)


def test_the_kl_is_observed_at_coefficient_zero_and_does_not_train():
    algorithm = built(reference=True)
    batch = rollout(*ROLLOUT)
    batch, _ = algorithm.assign_credit(batch.with_(ref_logprobs=outputs(batch, 3).logprobs.detach()))
    out = outputs(batch)
    found = algorithm.loss(batch, out)
    found.terms.sum().backward()
    assert flatten(found.metrics)["policy/kl_ref"] > 0
    torch.testing.assert_close(out.logprobs.grad, -batch.advantages)


def test_one_sample_per_prompt_has_nothing_to_compare():
    with pytest.raises(ValueError, match="samples_per_prompt must be at least 2, not 1"):
        grpo(GRPOConfig(), StepPlan(1, samples_per_prompt=1))
    assert grpo(GRPOConfig(), StepPlan(1, samples_per_prompt=2)).old_logprobs == "current"
