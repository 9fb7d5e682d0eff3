from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from tests.algo.algo_batches import rollout
from whet.algo.base import Need, StepPlan
from whet.algo.config import GRPOConfig, OTBConfig
from whet.algo.correction_config import CorrectionConfig
from whet.algo.correction_presets import PRESETS
from whet.algo.offpolicy import corrected, corrected_step, correction_metrics, kept_tokens
from whet.algo.table import build_algorithm
from whet.core.batch import TokenOutputs
from whet.observe.metrics import flatten
from whet.train.learners import mismatch
from whet.types import Origin


def two_samples():
    """The engine's log-probs are -1 where tokens train; the trainer's ratios are 1, e, 1/e and e^-3."""
    batch = rollout(("a", 1.0, True, [".##"]), ("a", 0.0, True, [".##"]))
    return batch, torch.tensor([0.0, -1.0, 0.0, 0.0, -2.0, -4.0])


def step_weights(batch, train, config):
    """What the loss of a step that is the whole batch is multiplied by."""
    return corrected_step(corrected(batch.with_(weights=torch.ones(batch.num_tokens)), train, config), config).correction


def test_weights_times_what_is_kept():
    batch, train = two_samples()
    config = CorrectionConfig.model_validate(
        {"weights": "token", "high": 2.0, "reject": [{"statistic": "token_k1", "high": math.exp(1.5), "low": 0.1}]}
    )
    assert kept_tokens(batch, train, config).tolist() == [True, True, True, True, True, False]
    found = step_weights(batch, train, config)
    assert found[batch.loss_mask].tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 0.0])
    assert step_weights(batch, train, CorrectionConfig(veto=0.1))[batch.loss_mask].tolist() == [1.0, 1.0, 0.0, 0.0]
    whole = step_weights(batch, train, CorrectionConfig(weights="token", normalize=True))
    assert whole[batch.loss_mask].mean().item() == pytest.approx(1.0)


def test_metrics_of_a_rollout():
    batch, train = two_samples()
    found = flatten(correction_metrics(batch, train, CorrectionConfig(weights="token", veto=0.1)))
    assert found["correction/kl"] == pytest.approx((0 - 1 + 1 + 3) / 4)
    assert found["correction/rejected"] == 0.5
    assert found["correction/bounded"] == pytest.approx(1 / 4)
    assert found["correction/train_log_ppl"] == pytest.approx((0.5 + 3.0) / 2)
    weights = [1.0, 2.0, math.exp(-1), math.exp(-3)]
    expected = sum(weights) ** 2 / 4 / sum(w * w for w in weights)
    assert found["correction/effective_sample_size"] == pytest.approx(expected, rel=1e-5)
    nothing = batch.with_(loss_mask=torch.zeros_like(batch.loss_mask))
    assert correction_metrics(nothing, train, CorrectionConfig(weights="token")) == {}


def test_metrics_of_a_rollout_of_which_every_token_has_the_weight_0():
    batch = rollout(("a", 1.0, True, [".##"]))
    found = flatten(correction_metrics(batch, torch.tensor([0.0, -9.0, -9.0]), CorrectionConfig(weights="token", bound="icepop")))
    assert (found["correction/weight"], found["correction/bounded"]) == (0.0, 1.0)
    assert "correction/effective_sample_size" not in found


def algorithm(correction, num_steps=2, **settings):
    config = GRPOConfig.model_validate({"normalize_std": False, "correction": correction, **settings})
    return build_algorithm(config, StepPlan(num_steps))


def test_a_rejected_token_counts_in_denominators_or_as_never_sampled():
    batch, train = two_samples()
    reject = {"reject": [{"statistic": "token_k2", "high": 1.0}]}
    shares = {}
    for rejected in ("weigh", "mask"):
        chosen = algorithm({**reject, "rejected": rejected}, reducer="token_mean")
        credited, metrics = chosen.assign_credit(batch.with_(old_logprobs=train))
        step = chosen.prepare(credited.with_(weights=chosen.reducer(credited)))
        shares[rejected] = step.weights.tolist()
        assert flatten(metrics)["correction/rejected"] == 0.25
    assert shares == {"weigh": [0, 0.25, 0.25, 0, 0.25, 0], "mask": [0, *(pytest.approx(1 / 3),) * 2, 0, pytest.approx(1 / 3), 0]}


def test_one_step_a_rollout_rejects_what_more_steps_reject():
    """A rejected token loses every term of the loss, its KL and entropy too, and the metrics say so."""
    batch, train = two_samples()
    losses, shares = {}, {}
    for num_steps in (1, 2):
        chosen = algorithm({"reject": [{"statistic": "token_k2", "high": 1.0}]}, num_steps, entropy_coef=0.5, kl_coef=0.3)
        assert {Need.OLD_LOGPROBS, Need.REF_LOGPROBS} == chosen.needs
        credited, metrics = chosen.assign_credit(batch.with_(old_logprobs=train, ref_logprobs=train - 0.5))
        step = chosen.prepare(credited.with_(weights=chosen.reducer(credited)))
        out = TokenOutputs(train.clone().requires_grad_(True), torch.full((6,), 2.0, requires_grad=True))
        (step.weights * chosen.loss(step, out).terms).sum().backward()
        losses[num_steps] = out.logprobs.grad.tolist() + out.entropy.grad.tolist()
        shares[num_steps] = flatten(metrics)["correction/rejected"]
        assert out.logprobs.grad[5] == out.entropy.grad[5] == 0 and out.logprobs.grad[4] != 0 != out.entropy.grad[4]
    assert losses[1] == losses[2] and shares == {1: 0.25, 2: 0.25}


def test_masked_tokens_count_in_the_weights_and_rejections_of_the_others():
    """Weights and kept tokens are of everything that was sampled, whatever of it is masked afterwards."""
    batch, train = two_samples()
    correction = {"weights": "sequence", "high": 10.0, "rejected": "mask", "reject": [{"statistic": "token_k2", "high": 1.0}]}
    chosen = algorithm(correction)
    credited, _ = chosen.assign_credit(batch.with_(old_logprobs=train))
    step = chosen.prepare(credited.with_(weights=chosen.reducer(credited)))
    assert step.loss_mask.tolist() == [False, True, True, False, True, False]
    assert step.correction[step.loss_mask].tolist() == pytest.approx([math.e, math.e, math.exp(-4)])

    divided = algorithm(correction | {"normalize": True})
    credited, _ = divided.assign_credit(batch.with_(old_logprobs=train))
    step = divided.prepare(credited.with_(weights=divided.reducer(credited)))
    mean = (math.e + math.exp(-4)) / 2
    assert step.correction[step.loss_mask].tolist() == pytest.approx([math.e / mean, math.e / mean, math.exp(-4) / mean])


@pytest.mark.parametrize("rejected", ["weigh", "mask"])
def test_the_optimal_token_baseline_takes_the_weights_of_the_whole_rollout(rejected):
    batch, train = two_samples()
    batch = batch.with_(old_logprobs=train, squared_probs=torch.full((6,), 0.5))
    correction = {"weights": "sequence", "high": 10.0, "rejected": rejected, "reject": [{"statistic": "token_k2", "high": 1.0}]}
    config = OTBConfig.model_validate({"correction": correction})
    found, _ = build_algorithm(config, StepPlan(2)).assign_credit(batch)
    energy = [math.exp(2) * (1.5 - 2 * math.exp(-1)), math.exp(-8) * (1.5 - 2 * math.exp(-2))]
    assert found.advantages[[1, 4]].tolist() == pytest.approx([1 - energy[0] / sum(energy), -energy[0] / sum(energy)], rel=1e-3)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_weights_multiply_the_policy_loss_alone(num_steps):
    batch, train = two_samples()
    chosen = algorithm({"weights": "token", "high": 2.0}, num_steps, entropy_coef=0.5)
    credited, _ = chosen.assign_credit(batch.with_(old_logprobs=train))
    step = chosen.prepare(credited.with_(weights=chosen.reducer(credited)))
    logprobs = train.clone().requires_grad_(True)
    out = TokenOutputs(logprobs, torch.full((6,), 2.0))
    found = chosen.loss(step, out)
    weights = torch.tensor([0, 1.0, 2.0, 0, math.exp(-1), math.exp(-3)])
    mask = batch.loss_mask
    expected = -weights * step.advantages - 0.5 * 2.0
    torch.testing.assert_close(found.terms[mask], expected[mask])
    (slope,) = torch.autograd.grad(found.terms.sum(), logprobs)
    torch.testing.assert_close(slope[mask], (-weights * step.advantages)[mask])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"weights": "token", "high": 2.0, "low": 3.0}, "low is 3.0 and high is 2.0"),
        ({"normalize": True}, "set weights to one of these"),
        ({"weights": "geometric", "normalize": True}, "set weights to one of these"),
        ({"reject": [{"statistic": "token_k3", "high": 1.0, "low": 0.5}]}, "leave out low"),
        ({"reject": [{"statistic": "max_k1", "high": 1.0}]}, "max_k1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(ValidationError) as caught:
        CorrectionConfig.model_validate(settings)
    assert text in str(caught.value) or "Input should be" in str(caught.value)


def test_the_engines_ratio_is_not_corrected_twice():
    with pytest.raises(ValueError, match="count it twice"):
        algorithm({"weights": "token"}, old_logprobs="rollout")


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_its_settings_and_yields_to_those_that_are_given(name):
    preset = PRESETS[name]
    found, plain = CorrectionConfig(preset=name), CorrectionConfig.model_validate(dict(preset.settings))
    assert found.model_dump(exclude={"preset"}) == plain.model_dump(exclude={"preset"})
    assert CorrectionConfig.model_validate(found.model_dump()) == found
    if "weights" in preset.settings:
        assert CorrectionConfig(preset=name, high=7.0).high == 7.0


def test_a_preset_that_bypasses_the_trainers_policy_says_what_it_takes():
    """Clipped: the ratio is over the engine's log-probs, and rejections are by the trainer's; else a plain policy gradient."""
    batch, train = two_samples()
    chosen = algorithm({"preset": "bypass_ppo_clip_k3_rs", "reject": [{"statistic": "token_k2", "high": 1.0}]}, 1)
    assert chosen.old_logprobs == "rollout" and Need.OLD_LOGPROBS in chosen.needs
    credited, metrics = chosen.assign_credit(batch.with_(old_logprobs=train))
    assert flatten(metrics)["correction/rejected"] == 0.25
    assert credited.loss_mask.tolist() == [False, True, True, False, True, False]
    assert torch.equal(credited.old_logprobs, train)
    step = chosen.prepare(credited.with_(weights=chosen.reducer(credited)))
    parts = chosen.parts(step, TokenOutputs(train, torch.zeros(6)))
    assert torch.equal(parts.old, batch.rollout_logprobs)
    with pytest.raises(ValueError, match=r"set loss\.name=reinforce"):
        algorithm({"preset": "bypass_pg_is"})
    with pytest.raises(ValueError, match="leave out old_logprobs"):
        algorithm({"preset": "bypass_ppo_clip"}, old_logprobs="recompute")
    plain = algorithm({"preset": "bypass_pg_is"}, loss={"name": "reinforce"})
    assert plain.old_logprobs == "recompute"
    with pytest.raises(ValidationError, match="preset"):
        CorrectionConfig(preset="decoupled")


def test_what_nobody_sampled_has_the_ratio_1():
    """The environment's tokens may train (batch.train_on): no engine gave them a log-prob."""
    batch, train = two_samples()
    given = torch.tensor([False, True, False, False, False, False])
    origin = batch.origin.masked_fill(given, int(Origin.ENVIRONMENT))
    logprobs = batch.rollout_logprobs.masked_fill(given, 0.0)
    mixed, train = batch.with_(origin=origin, rollout_logprobs=logprobs), train.masked_fill(given, -7.0)
    reject = [{"statistic": "token_k1", "high": 2.0, "low": 0.5}]
    config = CorrectionConfig.model_validate({"weights": "token", "high": 2.0, "reject": reject})
    assert step_weights(mixed, train, config)[1] == 1.0
    assert flatten(correction_metrics(mixed, train, config))["correction/kl"] == pytest.approx((0 - 1 + 1 + 3) / 4)
    assert flatten(mismatch(mixed, train))["mismatch/logprob_max"] == 3.0
