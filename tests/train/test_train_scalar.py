"""The backend over a scalar head: a critic's values, and its gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from tests.train.tiny_policy import DEVICE, gradients, qwen3, relative, rollout
from whet.algo.base import LossTerms, Need
from whet.algo.config import PPOConfig
from whet.algo.ppo import value_terms
from whet.core.weights import REDUCERS
from whet.model.config import ModelConfig
from whet.model.scalar import ScalarModel, load_scalar
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import OptimConfig, TrainConfig

DTYPES = {"float32": 1e-5, "float64": 1e-10}
PPO = PPOConfig()


def critic(dtype="float32", seed=0):
    """A tiny Qwen3 with a scalar head whose scores are some way off 0."""
    config = qwen3()
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = Qwen3ForSequenceClassification._from_config(config, attn_implementation="whet", dtype=torch.float32)
        torch.nn.init.normal_(hf.score.weight, std=0.3)
    model = ScalarModel(hf.to(DEVICE, getattr(torch, dtype)).eval())
    model.check()
    return model


def backend(model, *, budget=1000, rows="auto", **optim):
    return TorchBackend(model, TrainConfig(optim=OptimConfig(**optim), max_tokens_per_device=budget, rows=rows), total_steps=10)


def value_loss(batch, out):
    return value_terms(batch, out.values, PPO)


def step_batch():
    batch = rollout()
    places = torch.arange(batch.num_tokens)
    values, returns = torch.sin(places * 1.7) * 0.4, torch.cos(places * 0.9)
    return batch.with_(weights=REDUCERS["token_mean"](batch), values=values, returns=returns)


def plain_values(model, batch, *, after=False):
    """Values one sequence at a time through transformers' own model: the head on the state before each token, 0 before the first; or
    `after` each token."""
    twin = AutoModelForSequenceClassification.from_config(copy.deepcopy(model.config), attn_implementation="eager", dtype=torch.float64)
    twin.load_state_dict(model.hf.state_dict())
    twin.eval()
    out = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        hidden = twin.model(input_ids=tokens[None]).last_hidden_state[0]
        scores = hidden @ twin.score.weight[0]
        out.append(scores if after else torch.cat([hidden.new_zeros(1), scores[:-1]]))
    return twin, torch.cat(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["chains", "forest"])
def test_values_are_the_heads_on_the_state_before_each_token_of_every_valid_sample(dtype, rows):
    model, batch = critic(dtype), rollout()
    annotated = backend(model, budget=40, rows=rows).annotate(batch, Need.VALUES)
    found = annotated.values
    with torch.no_grad():
        (_, expected), (_, after) = plain_values(model, batch), plain_values(model, batch, after=True)
    valid = batch.valid[batch.sample_of_token]
    assert not bool(valid.all()) and not bool(batch.loss_mask[valid].all())
    assert found.dtype == torch.float32 and found[~valid].tolist() == [0.0] * int((~valid).sum())
    torch.testing.assert_close(found.double()[valid], expected[valid], rtol=1e-5, atol=1e-5)
    longer = valid & (batch.lengths > 1)[batch.sample_of_token]  # a sample of one token has none to be trained
    torch.testing.assert_close(annotated.scores.double()[longer], after[longer], rtol=1e-5, atol=1e-5)
    assert not any(p.grad is not None for p in model.hf.parameters())


@pytest.mark.parametrize("rows", ["chains", "forest"])
def test_the_critics_gradient_is_that_of_an_independent_float64_model(rows):
    """The formula written out: half the larger of the plain and the clipped squared error, token mean."""
    model, batch = critic("float64"), step_batch()
    found = backend(model, budget=40, rows=rows).forward_backward(batch, value_loss)
    grads = gradients(model)
    twin, predicted = plain_values(model, batch)
    returns, old = batch.returns.double(), batch.values.double()
    near = old + (predicted - old).clamp(-0.2, 0.2)
    losses = torch.maximum((predicted - returns) ** 2, (near - returns) ** 2)[batch.loss_mask]
    loss = losses.mean() / 2
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)  # weights are float32
    expected = {name: p.grad for name, p in twin.named_parameters()}
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert relative(grad, expected[name]) < 1e-5, name
    assert found.logprobs.tolist() == [0.0] * batch.num_tokens


@pytest.fixture(scope="module")
def models():
    return {dtype: critic(dtype) for dtype in DTYPES}


@pytest.fixture(scope="module")
def whole(models):
    model = models["float64"]
    found = backend(model).forward_backward(step_batch(), value_loss)
    grads = gradients(model)
    model.hf.zero_grad()
    return found, grads


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_no_cut_changes_the_critics_loss_or_gradient(models, whole, dtype, data):
    model, batch = models[dtype], step_batch()
    order = data.draw(st.permutations(range(batch.num_samples)))
    budget, rows = data.draw(st.integers(1, 90)), data.draw(st.sampled_from(["chains", "forest"]))
    found = backend(model, budget=budget, rows=rows).forward_backward(batch.select(order), value_loss)
    grads = gradients(model)
    model.hf.zero_grad()
    assert found.loss == pytest.approx(whole[0].loss, rel=DTYPES[dtype])
    for name, grad in grads.items():
        assert relative(grad, whole[1][name]) < DTYPES[dtype], name


def test_a_reward_models_score_is_transformers_own_of_the_whole_sample():
    model, batch = critic(), rollout()
    twin, _ = plain_values(model, batch)
    ends = batch.starts + batch.lengths - 1
    seen = []

    def loss(part, out):
        seen.extend(out.scores[part.starts + part.lengths - 1].tolist())
        return LossTerms(out.scores, {})

    batch = batch.with_(loss_mask=torch.ones_like(batch.loss_mask).index_fill(0, batch.starts, False))
    backend(model, budget=1000, rows="chains").forward_backward(batch.with_(weights=torch.zeros(batch.num_tokens)), loss)
    chosen = [i for i, length in enumerate(batch.lengths.tolist()) if length > 1]
    with torch.no_grad():
        sequences = batch.tokens.split(batch.lengths.tolist())
        expected = [float(twin(input_ids=sequences[i][None]).logits[0, 0]) for i in chosen]
    assert len(ends) > len(chosen) > 3
    assert seen == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_head_computes_its_own_columns_only():
    with pytest.raises(ValueError, match="this backend cannot compute old_logprobs"):
        backend(critic()).annotate(rollout(), Need.OLD_LOGPROBS)


def test_what_a_critic_exports_loads_as_a_reward_model(tmp_path):
    trained = backend(critic(), lr=1e-2)
    trained.forward_backward(step_batch(), value_loss)
    trained.optim_step()
    trained.export(tmp_path)
    again = dict(load_scalar(tmp_path, ModelConfig(path="x", device=DEVICE), trainable=False).named_weights())
    assert all(torch.equal(again[name], weight) for name, weight in trained.named_weights())
    assert type(AutoModelForSequenceClassification.from_pretrained(tmp_path)) is Qwen3ForSequenceClassification


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_go_on_bit_for_bit(dtype, tmp_path):
    def run(trained, steps):
        for _ in range(steps):
            trained.forward_backward(step_batch(), value_loss)
            trained.optim_step()

    straight, first, second = (backend(critic(dtype, seed), budget=30, lr=1e-2, schedule="cosine") for seed in (0, 0, 9))
    run(straight, 4)
    run(first, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    run(second, 2)
    expected, found = dict(straight.named_weights()), dict(second.named_weights())
    assert expected.keys() == found.keys() and "score.weight" in found
    assert all(torch.equal(expected[name], found[name]) for name in expected)
