from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import nn

from tests.train.tiny_policy import VOCAB, gradients, plain, policy, relative, rollout
from whet.algo.base import LossTerms, Need, StepPlan
from whet.algo.config import AlgorithmConfig, GRPOConfig
from whet.algo.grpo import grpo
from whet.algo.sft import sft_loss
from whet.algo.table import build_algorithm
from whet.core.nonfinite import NonFinite
from whet.core.weights import REDUCERS
from whet.observe.metrics import flatten
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import OptimConfig, TrainConfig

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
CLIP = OptimConfig(lr=1e-3, clip_grad=0.5)


def backend(model, *, budget=1000, chunk=None, **optim):
    config = TrainConfig(optim=OptimConfig(**optim), max_tokens_per_device=budget, logprob_chunk_tokens=chunk)
    return TorchBackend(model, config, total_steps=10)


def step_batch(reducer="sample_mean"):
    """A whole step with credit, weights, and old and reference log-probs some way off."""
    algorithm = grpo(GRPOConfig(entropy_coef=0.05, kl_coef=0.1, clip_high=0.28, reducer=reducer), StepPlan(2))
    batch, _ = algorithm.assign_credit(rollout())
    shift = torch.linspace(-0.4, 0.4, batch.num_tokens)
    batch = batch.with_(weights=algorithm.reducer(batch), old_logprobs=batch.rollout_logprobs)
    return algorithm, batch.with_(ref_logprobs=(batch.rollout_logprobs + shift) * batch.loss_mask)


def accumulate(model, algorithm, batch, *, budget, chunk):
    found = backend(model, budget=budget, chunk=chunk).forward_backward(batch, algorithm.loss, entropy_grad=True)
    grads = gradients(model)
    model.hf.zero_grad()
    norm = float(torch.nn.utils.get_total_norm(grads.values()))
    return found, grads, norm


@pytest.fixture(scope="module")
def models():
    """The same weights by (dtype, gradient checkpointing)."""
    single = dict(policy("float32").named_weights())
    out = {}
    for dtype in TOLERANCE:
        for recompute in (False, True):
            out[dtype, recompute] = model = policy(dtype, gradient_checkpointing=recompute)
            with torch.no_grad():
                for name, weight in model.named_weights():
                    weight.copy_(single[name])
    return out


@pytest.fixture(scope="module")
def expected(models):
    """Everything in one row and one chunk, in float64: what every cut has to give."""
    whole = {"budget": 1000, "chunk": 1000}
    return {reducer: accumulate(models["float64", False], *step_batch(reducer), **whole) for reducer in REDUCERS}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reducer", REDUCERS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_no_cut_changes_loss_gradient_or_norm(models, expected, dtype, reducer, data):
    algorithm, batch = step_batch(reducer)
    order = data.draw(st.permutations(range(batch.num_samples)))
    budget = data.draw(st.integers(1, 90))
    chunk = data.draw(st.integers(1, 50))
    recompute = data.draw(st.booleans())
    found, grads, norm = accumulate(models[dtype, recompute], algorithm, batch.select(order), budget=budget, chunk=chunk)
    reference, reference_grads, reference_norm = expected[reducer]
    tolerance = TOLERANCE[dtype]
    assert found.loss == pytest.approx(reference.loss, rel=tolerance)
    assert norm == pytest.approx(reference_norm, rel=tolerance)
    assert grads.keys() == reference_grads.keys()
    for name, grad in grads.items():
        assert relative(grad, reference_grads[name]) < tolerance, name
    assert flatten(found.metrics) == pytest.approx(flatten(reference.metrics), rel=1e-4)
    reordered = torch.cat([reference.logprobs.split(batch.lengths.tolist())[i] for i in order])
    torch.testing.assert_close(found.logprobs, reordered, rtol=1e-5, atol=1e-5)


def log_likelihoods(model, batch):
    """One sequence at a time through a plain model. Per sample: log-prob of each token after the first."""
    out = []
    for tokens, heat in zip(batch.tokens.split(batch.lengths.tolist()), batch.temperature.tolist(), strict=True):
        logits = model(input_ids=tokens[None]).logits[0, :-1] / heat
        out.append(logits.log_softmax(-1).gather(-1, tokens[1:, None]).squeeze(-1))
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_annotated_logprobs_are_the_plain_models(models, dtype):
    model, batch = models[dtype, False], rollout()
    found = backend(model, budget=40, chunk=7).annotate(batch, Need.REF_LOGPROBS)
    assert found.old_logprobs is None and found.ref_logprobs.dtype == torch.float32
    with torch.no_grad():
        rows = [torch.cat([row.new_zeros(1), row]) for row in log_likelihoods(plain(model), batch)]
    expected = torch.cat(rows) * batch.loss_mask
    torch.testing.assert_close(found.ref_logprobs.double(), expected.double(), rtol=1e-5, atol=1e-5)
    assert not any(p.grad is not None for p in model.hf.parameters())


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_annotated_squared_probs_are_the_plain_models(models, dtype):
    model, batch = models[dtype, False], rollout()
    found = backend(model, budget=40, chunk=7).annotate(batch, Need.SQUARED_PROBS).squared_probs
    expected = []
    with torch.no_grad():
        for tokens, heat in zip(batch.tokens.split(batch.lengths.tolist()), batch.temperature.tolist(), strict=True):
            probs = (plain(model)(input_ids=tokens[None]).logits[0, :-1] / heat).softmax(-1)
            expected += [torch.zeros(1), probs.square().sum(-1)]
    torch.testing.assert_close(found.double(), (torch.cat(expected) * batch.loss_mask).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gspo", "cispo", "gmpo", "rloo", "reinforce_plus_plus", "otb"])
def test_an_algorithms_gradient_does_not_depend_on_the_budget(models, name):
    """Through the model: rows of 40 tokens and log-probs in chunks against everything at once."""
    algorithm = build_algorithm(TypeAdapter(AlgorithmConfig).validate_python({"name": name}), StepPlan(2))
    batch = rollout()
    for need in algorithm.needs:
        batch = backend(models["float64", False]).annotate(batch, need)
    batch, _ = algorithm.assign_credit(batch)
    step = algorithm.prepare(batch.with_(weights=algorithm.reducer(batch)))
    whole, grads, _ = accumulate(models["float64", False], algorithm, step, budget=1000, chunk=None)
    cut, cut_grads, _ = accumulate(models["float64", False], algorithm, step, budget=40, chunk=3)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-9)
    assert max(relative(cut_grads[key], grads[key]) for key in grads) < 1e-9


@pytest.mark.parametrize("recompute", [False, True])
def test_sft_gradients_are_the_plain_models(models, recompute):
    model, batch = models["float64", recompute], rollout()
    batch = batch.with_(weights=REDUCERS["token_mean"](batch))
    found = backend(model, budget=40, chunk=7).forward_backward(batch, sft_loss)
    grads = gradients(model)
    model.hf.zero_grad()
    twin = plain(model)
    likelihoods = torch.cat([torch.cat([row.new_zeros(1), row]) for row in log_likelihoods(twin, batch)])
    loss = -likelihoods[batch.loss_mask].mean()
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-7)
    for name, p in twin.named_parameters():
        assert relative(grads[name], p.grad) < TOLERANCE["float32"], name  # the norms compute in float32


def test_only_samples_that_train_go_through_the_model():
    batch = rollout()
    trains = [any(mask) for mask in batch.ragged(batch.loss_mask)]
    expected = sum(n for n, yes in zip(batch.lengths.tolist(), trains, strict=True) if yes)
    batch = batch.with_(weights=REDUCERS["token_mean"](batch))
    found = backend(policy()).forward_backward(batch, sft_loss)
    assert not all(trains) and found.num_tokens == expected


def test_a_batch_without_a_trained_token_is_no_work_and_no_step():
    model, batch = policy(), rollout()
    batch = batch.with_(loss_mask=torch.zeros_like(batch.loss_mask))
    batch = batch.with_(weights=REDUCERS["token_mean"](batch))
    trained = backend(model)
    found = trained.forward_backward(batch, sft_loss)
    assert (found.loss, found.num_tokens, found.metrics) == (0.0, 0, {})
    assert found.logprobs.tolist() == [0.0] * batch.num_tokens
    assert trained.annotate(batch, Need.OLD_LOGPROBS).old_logprobs.tolist() == [0.0] * batch.num_tokens
    before = {name: weight.clone() for name, weight in trained.named_weights()}
    trained.optim_step()
    assert all(torch.equal(before[name], weight) for name, weight in trained.named_weights())


def test_a_loss_that_is_not_finite_names_its_samples_and_leaves_no_gradient():
    model = policy()
    trained = backend(model, budget=20)
    batch = rollout().with_(advantages=None)
    batch = batch.with_(weights=REDUCERS["token_mean"](batch))

    def poisoned(part, out):
        terms = -out.logprobs
        return LossTerms(torch.where(part.tokens == poison, terms * math.nan, terms), {})

    poison = int(batch.tokens[int(batch.starts[8]) + 8])  # only sample 8 may have it
    batch = batch.with_(tokens=torch.where(batch.tokens == poison, (batch.tokens + 1) % VOCAB, batch.tokens))
    tokens = batch.tokens.clone()
    tokens[int(batch.starts[8]) + 8] = poison
    batch = batch.with_(tokens=tokens)
    with pytest.raises(NonFinite, match=r"loss of a micro-batch is nan \(1 tokens of the step's samples \[8\]\)"):
        trained.forward_backward(batch, poisoned)
    assert all(p.grad is None for p in model.hf.parameters())
    trained.forward_backward(batch, sft_loss)
    assert flatten(trained.optim_step())["optim/grad_norm"] > 0


def test_what_this_backend_cannot_do_is_refused():
    with pytest.raises(ValueError, match="cannot compute values"):
        backend(policy()).annotate(rollout(), Need.VALUES)
    with pytest.raises(ValueError, match="no adapter to publish"):
        backend(policy()).named_weights("adapter")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_save_and_load_go_on_bit_for_bit(dtype, tmp_path):
    batch = rollout()
    batch = batch.with_(weights=REDUCERS["sample_mean"](batch))

    def run(trained, steps):
        for _ in range(steps):
            trained.forward_backward(batch, sft_loss)
            trained.optim_step()

    settings = {"lr": 1e-2, "schedule": "cosine", "weight_decay": 0.1, "warmup_steps": 2}
    straight, first = (backend(policy(dtype), budget=30, **settings) for _ in range(2))
    run(straight, 5)
    run(first, 2)
    first.save(tmp_path)
    second = backend(policy(dtype, seed=9), budget=30, **settings)
    run(second, 1)
    second.load(tmp_path)
    run(second, 3)
    expected, found = dict(straight.named_weights()), dict(second.named_weights())
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert second.optimizer.steps == 5


def test_weights_alone_are_what_a_bfloat16_step_goes_on_from(tmp_path):
    """The float32 masters are made anew from what was loaded: the old ones would undo it at the first step."""
    batch = rollout()
    batch = batch.with_(weights=REDUCERS["sample_mean"](batch))
    first, second = (backend(policy("bfloat16", seed=seed), lr=0.0) for seed in (9, 0))
    first.save(tmp_path)
    second.load(tmp_path, optimizer=False)
    second.forward_backward(batch, sft_loss)
    second.optim_step()
    expected, found = dict(first.named_weights()), dict(second.named_weights())
    assert all(torch.equal(expected[name], weight) for name, weight in found.items()), "a learning rate of 0 leaves what was restored"


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    trained = backend(policy())
    trained.save(tmp_path)
    assert json.loads((tmp_path / "optimizer.json").read_text()) == {"name": "adamw", "steps": 0}
    path = tmp_path / "weights.safetensors"
    weights = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"
    num = len(weights[name])
    for change, message in [
        ({name: weights[name][:-1].contiguous()}, rf"{name} is torch.float32 \({num - 1}, 32\), not torch.float32 \({num}, 32\)"),
        ({name: weights[name].bfloat16()}, rf"{name} is torch.bfloat16 \({num}, 32\), not torch.float32"),
        ({"lm_head.weight": weights[name].clone()}, r"another model: 1 names differ, among them lm_head.weight"),
    ]:
        save_file({**weights, **change}, path)
        with pytest.raises(ValueError, match=message):
            trained.load(tmp_path)


def test_a_bfloat16_step_follows_the_float32_one():
    batch = rollout()
    batch = batch.with_(weights=REDUCERS["sample_mean"](batch))
    low, high = policy("bfloat16"), policy("float32")
    with torch.no_grad():
        for (_, a), (_, b) in zip(low.named_weights(), high.named_weights(), strict=True):
            b.copy_(a)
    found = [backend(model, budget=30, chunk=5).forward_backward(batch, sft_loss) for model in (low, high)]
    assert found[0].loss == pytest.approx(found[1].loss, rel=0.02)
    torch.testing.assert_close(found[0].logprobs, found[1].logprobs, rtol=0.02, atol=0.15)


@pytest.mark.parametrize("clip_grad", [None, 0.01])
def test_an_optimizer_step_on_cut_gradients_is_torchs_on_whole_ones(clip_grad):
    batch = rollout()
    batch = batch.with_(weights=REDUCERS["sample_mean"](batch))
    model = policy()
    twin = plain(model)
    trained = backend(model, budget=25, chunk=9, lr=1e-2, eps=1e-3, clip_grad=clip_grad)
    trained.forward_backward(batch, sft_loss)
    metrics = flatten(trained.optim_step())
    likelihoods = torch.cat([torch.cat([row.new_zeros(1), row]) for row in log_likelihoods(twin, batch)])
    (-(batch.weights * likelihoods).sum()).backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), clip_grad or math.inf)
    torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0).step()
    assert metrics["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(dict(trained.named_weights())[name].cpu(), p, rtol=1e-5, atol=1e-6)
