"""Training in float16: the loss's scale, steps that overflow, checkpoints."""

from __future__ import annotations

import json

import pytest
import torch

from tests.train.test_train_backend import backend, step_batch
from tests.train.tiny_policy import policy, rollout
from whet.algo.sft import sft_loss
from whet.core.nonfinite import NonFinite
from whet.core.weights import REDUCERS
from whet.observe.metrics import flatten
from whet.train.torch_native import loss_scale
from whet.train.torch_native.loss_scale import FIRST, LossScale


def weighed(factor=1.0):
    batch = rollout()
    return batch.with_(weights=REDUCERS["sample_mean"](batch) * factor)


def gradients_of(trained):
    """Gradients of the loss as it is, by parameter."""
    scale = 1.0 if trained._scale is None else trained._scale.value
    named = zip(trained.optimizer._masters, trained.optimizer.masters, strict=True)
    return {name: master.grad.float() / scale for name, master in named}


def twins():
    """A model in float16 and the same weights in float32."""
    low, high = policy("float16"), policy("float32")
    with torch.no_grad():
        for (_, a), (_, b) in zip(low.named_weights(), high.named_weights(), strict=True):
            b.copy_(a)
    return low, high


def farthest(found, expected):
    return max(float((found[name] - grad).norm() / grad.norm()) for name, grad in expected.items() if float(grad.norm()) > 0)


@pytest.mark.parametrize(("first", "far"), [(2.0**30, False), (1.0, True)], ids=["scaled", "as-it-is"])
def test_gradients_far_below_float16_are_those_of_float32_only_if_the_loss_is_scaled(monkeypatch, first, far):
    monkeypatch.setattr(loss_scale, "FIRST", first)
    low, high = twins()
    found, expected = backend(low, budget=30), backend(high, budget=30)
    for each in (found, expected):
        each.forward_backward(weighed(1e-6), sft_loss)  # as of a batch of millions of tokens
    apart = farthest(gradients_of(found), gradients_of(expected))
    assert (apart > 0.5) if far else (apart < 0.02)


def test_a_step_whose_gradients_overflow_is_computed_again_with_all_its_passes():
    one, two = (backend(policy("float16"), budget=30, lr=1e-2) for _ in range(2))
    two._scale.value = FIRST / 16**3
    algorithm, batch = step_batch()
    for trained in (one, two):
        trained.forward_backward(batch, algorithm.loss, entropy_grad=True)
        trained.forward_backward(weighed(), sft_loss)
    first, second = flatten(one.optim_step()), flatten(two.optim_step())
    assert first["optim/repeated_steps"] > second["optim/repeated_steps"]
    assert first["optim/loss_scale"] == second["optim/loss_scale"] == one._scale.value < FIRST
    assert first["optim/grad_norm"] == second["optim/grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(one.optimizer.masters, two.optimizer.masters, strict=True))
    one.forward_backward(weighed(), sft_loss)
    assert flatten(one.optim_step())["optim/repeated_steps"] == 0, "passes of a step that is taken are forgotten"


def test_an_overflow_of_one_row_counts_though_others_are_in_the_sum_already():
    batch = weighed()
    trained, twin = (backend(policy("float16"), budget=10, lr=0.0) for _ in range(2))
    trained.forward_backward(batch, sft_loss)
    trained.optim_step()
    settled = trained._scale.value
    heavy = batch.with_(weights=batch.weights * torch.where(batch.sample_of_token == batch.num_samples - 1, 300.0, 1.0))
    trained.forward_backward(heavy, sft_loss)
    found = flatten(trained.optim_step())
    assert found["optim/repeated_steps"] >= 1 and found["optim/loss_scale"] < settled
    twin._scale.value = found["optim/loss_scale"]
    twin.forward_backward(heavy, sft_loss)
    assert flatten(twin.optim_step())["optim/grad_norm"] == found["optim/grad_norm"]


def test_a_step_without_any_gradient_leaves_the_search_as_it_was():
    one, two = (backend(policy("float16"), budget=30) for _ in range(2))
    one.forward_backward(weighed(0.0), sft_loss)  # as of siblings with one reward
    assert flatten(one.optim_step())["optim/grad_norm"] == 0
    for each in (one, two):
        each.forward_backward(weighed(), sft_loss)
    first, second = flatten(one.optim_step()), flatten(two.optim_step())
    assert first["optim/repeated_steps"] == second["optim/repeated_steps"] > 0
    assert first["optim/loss_scale"] == second["optim/loss_scale"]


def test_gradients_that_no_scale_makes_finite_stop_the_run_and_change_nothing():
    trained = backend(policy("float16"), budget=30)
    before = [master.detach().clone() for master in trained.optimizer.masters]

    def hopeless(part, out):
        found = sft_loss(part, out)
        return type(found)(out.logprobs * 0 + torch.sqrt(out.logprobs * 0), found.metrics)  # finite, and its gradient is not

    trained.forward_backward(weighed(), hopeless)
    with pytest.raises(NonFinite, match=r"gradient norm is nan; .*set model\.dtype to bfloat16"):
        trained.optim_step()
    assert trained._scale.value == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, trained.optimizer.masters, strict=True))
    trained.forward_backward(weighed(), sft_loss)
    metrics = flatten(trained.optim_step())
    assert metrics["optim/repeated_steps"] == 0 and metrics["optim/grad_norm"] > 0, "what had failed is not repeated"


def test_the_scale_falls_by_16_until_a_step_succeeds_then_by_2_and_doubles_after_a_thousand_steps():
    scale = LossScale()
    assert scale.value == 2.0**32
    assert scale.lower() and scale.value == 2.0**28
    scale.succeed()
    assert scale.lower() and scale.value == 2.0**27
    for _ in range(999):
        scale.succeed()
    assert scale.value == 2.0**27
    scale.succeed()
    assert scale.value == 2.0**28
    for _ in range(28):
        assert scale.lower()
    assert scale.value == 1.0 and not scale.lower() and scale.value == 1.0


def test_a_checkpoint_has_the_scale_and_one_of_another_dtype_begins_the_search_anew(tmp_path):
    first = backend(policy("float16"), budget=30)
    first.forward_backward(weighed(), sft_loss)
    first.optim_step()
    first.save(tmp_path / "half")
    saved = json.loads((tmp_path / "half/optimizer.json").read_text())["loss_scale"]
    assert saved == {"value": first._scale.value, "steps": 1, "settled": True} and saved["value"] < FIRST
    second = backend(policy("float16", seed=9), budget=30)
    second.load(tmp_path / "half")
    assert second._scale.state() == saved
    second.load(tmp_path / "half", optimizer=False)
    assert second._scale.state() == saved
    second._scale.load(None)
    assert second._scale.state() == LossScale().state()
