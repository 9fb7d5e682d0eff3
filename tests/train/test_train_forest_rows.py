"""Forest rows against chains: everything that leaves the backend is the same, and less goes through the model."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from tests.train.tiny_policy import DEVICE, VOCAB, gradients, plain, policy, qwen3, relative, rollout
from whet.algo.base import Need, StepPlan
from whet.algo.config import GRPOConfig
from whet.algo.grpo import grpo
from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import REDUCERS
from whet.model import forest_check
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.forest import ForestRow
from whet.observe.metrics import flatten
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Origin, Sample

pytestmark = pytest.mark.long

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
BF16_TOLERANCE = 0.05
LLAMA = LlamaConfig(
    vocab_size=VOCAB, hidden_size=32 if DEVICE == "cpu" else 64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=48,
    max_position_embeddings=128, tie_word_embeddings=False, initializer_range=0.15, bos_token_id=None, eos_token_id=0, pad_token_id=None,
)  # fmt: skip
SHAPES = {
    "qwen3, tied, 2 heads to a key": qwen3(),
    "llama, untied": LLAMA,
    "llama, one key head": LlamaConfig(**{**LLAMA.to_dict(), "num_key_value_heads": 1}),
}


def model_of(shape, dtype, *, recompute=False):
    config = ModelConfig(path="tiny", dtype=dtype, device=DEVICE, gradient_checkpointing=recompute)
    model = random_causal(SHAPES[shape], config, seed=3)
    if dtype == "float64":
        for module in model.hf.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(norm, module)
    return model


def norm(module, x):
    """transformers computes it in float32, so that a last bit of float64 before it is 1e-8 behind it."""
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


@st.composite
def samples(draw):
    """Extensions, prefixes and copies of earlier samples and new ones, down to one token; masks and temperatures of their own."""
    out = []
    for i in range(draw(st.integers(2, 9))):
        base = draw(st.sampled_from(out)).tokens if out and draw(st.integers(0, 3)) else ()
        kept = base[: draw(st.integers(0, len(base)))]
        tokens = (kept + tuple(draw(st.lists(st.integers(0, 2), max_size=8)))) or (1,)
        mask = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        rng = random.Random(i)
        out.append(
            Sample(
                tokens=tokens,
                origin=tuple(Origin.MODEL if m else Origin.ENVIRONMENT for m in mask),
                loss_mask=(False, *mask[1:]),
                logprobs=tuple(-rng.uniform(2, 6) for _ in tokens),
                versions=(0,) * len(tokens),
                group=f"group {i % 2}",
                trajectory=f"{i}",
                order=0,
                reward=rng.uniform(-1, 1),
                valid=True,
                temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
            )
        )
    return out


def step_of(data):
    """A step with credit, weights, and old and reference log-probs: siblings have other advantages for the tokens that they share."""
    algorithm = grpo(GRPOConfig(entropy_coef=0.05, kl_coef=0.1, clip_high=0.28), StepPlan(2))
    batch, _ = algorithm.assign_credit(batch_of(list(data)))
    shift = torch.linspace(-0.4, 0.4, batch.num_tokens)
    batch = batch.with_(weights=algorithm.reducer(batch), old_logprobs=batch.rollout_logprobs)
    return algorithm, batch.with_(ref_logprobs=(batch.rollout_logprobs + shift) * batch.loss_mask)


def backend(model, rows, *, budget=10_000, chunk=None):
    return TorchBackend(model, TrainConfig(rows=rows, max_tokens_per_device=budget, logprob_chunk_tokens=chunk), total_steps=None)


def learn(model, batch, loss, rows, **options):
    """What a pass found, and every gradient."""
    policy = backend(model, rows, **options)
    policy.optimizer = model  # a pass only asks that there be one
    found = policy.forward_backward(batch, loss, entropy_grad=True)
    grads = gradients(model)
    model.hf.zero_grad()
    return found, grads


def trained(batch):
    """The tokens of each sample that trains."""
    pairs = zip(batch.ragged(batch.tokens), batch.ragged(batch.loss_mask), strict=True)
    return [tuple(tokens) for tokens, mask in pairs if any(mask)]


def num_prefixes(batch):
    return len({tokens[: n + 1] for tokens in trained(batch) for n in range(len(tokens))})


def same(found, expected, tolerance):
    """Loss, log-probs and gradients; a gradient may be nothing but the rounding of larger ones."""
    (a, grads), (b, expected_grads) = found, expected
    assert a.loss == pytest.approx(b.loss, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(a.logprobs, b.logprobs, rtol=1e-5, atol=1e-5)
    assert grads.keys() == expected_grads.keys()
    whole = float(torch.nn.utils.get_total_norm(expected_grads.values())) if grads else 0.0
    for name, grad in grads.items():
        distance, size = float((grad - expected_grads[name]).norm()), float(expected_grads[name].norm())
        assert distance <= tolerance * (size + 0.1 * whole), (name, distance, size)


@pytest.fixture(scope="module")
def models():
    return {
        (shape, dtype, recompute): model_of(shape, dtype, recompute=recompute)
        for shape in SHAPES
        for dtype in TOLERANCE
        for recompute in (False, True)
    }


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None)
@given(data=samples(), recompute=st.booleans(), chunk=st.integers(1, 40))
def test_a_forest_is_its_chains(models, shape, dtype, data, recompute, chunk):
    algorithm, batch = step_of(data)
    model = models[shape, dtype, recompute]
    expected = learn(model, batch, algorithm.loss, "chains")
    found = learn(model, batch, algorithm.loss, "forest", chunk=chunk)
    same(found, expected, TOLERANCE[dtype])
    assert flatten(found[0].metrics) == pytest.approx({**flatten(expected[0].metrics), **shared(batch)}, rel=1e-4, abs=1e-6)
    assert found[0].num_tokens == num_prefixes(batch)
    for need in (Need.REF_LOGPROBS, Need.SQUARED_PROBS):
        columns = [getattr(backend(model, rows, chunk=chunk).annotate(batch, need), need.value) for rows in ("forest", "chains")]
        torch.testing.assert_close(*columns, rtol=1e-5, atol=1e-5)


def shared(batch):
    total = sum(len(tokens) for tokens in trained(batch))
    return {"train/shared": 1 - num_prefixes(batch) / total} if total else {}


@settings(max_examples=30, deadline=None)
@given(data=samples(), budget=st.integers(1, 40), rng=st.randoms())
def test_neither_the_budget_nor_the_order_of_samples_changes_anything(models, data, budget, rng):
    model = models["qwen3, tied, 2 heads to a key", "float64", False]
    algorithm, batch = step_of(data)
    expected = learn(model, batch, algorithm.loss, "chains")
    same(learn(model, batch, algorithm.loss, "forest", budget=budget), expected, TOLERANCE["float64"])
    order = list(range(len(data)))
    rng.shuffle(order)
    found, grads = learn(model, batch.select(order), algorithm.loss, "forest", budget=budget)
    reordered = torch.cat([expected[0].logprobs.split(batch.lengths.tolist())[i] for i in order])
    torch.testing.assert_close(found.logprobs, reordered, rtol=1e-6, atol=1e-6)
    for name, grad in expected[1].items():
        assert float((grads[name] - grad).norm()) <= 1e-9 * float(torch.nn.utils.get_total_norm(expected[1].values())), name


def test_a_forest_is_the_plain_model_one_sample_at_a_time():
    """Nothing of whet's attention: transformers' own, with its own masks."""
    model, heats = policy("float64", seed=3), [1.0, 0.5, 1.0, 2.0]
    batch = batch_of([*siblings(9, [(7, 8, 9), (7, 8, 3), (7, 8), (5,) * 4], heats=heats)])
    batch = batch.with_(weights=REDUCERS["sample_mean"](batch))
    found, grads = learn(model, batch, sft_loss, "forest")
    squared = backend(model, "forest").annotate(batch, Need.SQUARED_PROBS).squared_probs
    twin = plain(model)
    loss, logprobs, squares = 0.0, [], []
    columns = (batch.tokens, batch.weights)
    for tokens, weights, heat in zip(*(column.split(batch.lengths.tolist()) for column in columns), heats, strict=True):
        rows = (twin(input_ids=tokens[None]).logits[0, :-1] / heat).log_softmax(-1)[8:]
        logprobs.append(rows.gather(-1, tokens[9:, None])[:, 0])
        squares.append(rows.exp().square().sum(-1))
        loss = loss - (weights[9:] * logprobs[-1]).sum()
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    for column, expected in [(found.logprobs, logprobs), (squared, squares)]:
        torch.testing.assert_close(column[batch.loss_mask].double(), torch.cat(expected).detach().double(), rtol=1e-6, atol=1e-6)
    for name, p in twin.named_parameters():
        assert relative(grads[name], p.grad) < 1e-6, name


def siblings(num_prompt, replies, *, heats=None):
    """A group: one prompt, replies that train."""
    prompt = tuple(range(num_prompt))
    for i, reply in enumerate(replies):
        yield Sample(
            tokens=prompt + tuple(reply),
            origin=(Origin.PROMPT,) * num_prompt + (Origin.MODEL,) * len(reply),
            loss_mask=(False,) * num_prompt + (True,) * len(reply),
            logprobs=(0.0,) * num_prompt + (-3.0,) * len(reply),
            versions=(-1,) * num_prompt + (0,) * len(reply),
            group="a",
            trajectory=f"a/{i}",
            order=0,
            reward=float(i),
            valid=True,
            temperature=heats[i] if heats else 1.0,
        )


def test_a_shared_action_has_one_line_of_logits_for_each_temperature(models, monkeypatch):
    model = models["llama, untied", "float32", False]
    replies = [(7, 8, 9), (7, 8, 3), (7, 8, 9), (5,)]
    lines = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: lines.append(len(hidden)) or logits(hidden))
    for heats, expected in [(None, 5), ([1.0, 1.0, 0.5, 0.5], 8)]:
        algorithm, batch = step_of(siblings(6, replies, heats=heats))
        lines.clear()
        found = learn(model, batch, algorithm.loss, "forest")
        assert (sum(lines), found[0].num_tokens) == (expected, 6 + 5)


def test_bfloat16_follows(models):
    batch = batch_of([*siblings(20, [(7, 8, 9), (7, 8, 3), (5,), (9,) * 30])])
    batch = batch.with_(weights=REDUCERS["sample_mean"](batch))
    found = []
    for rows in ("chains", "forest"):
        model = model_of("qwen3, tied, 2 heads to a key", "bfloat16")
        policy = TorchBackend(model, TrainConfig(rows=rows), total_steps=1)
        passed = policy.forward_backward(batch, sft_loss)
        found.append((passed, {name: master.grad for name, master in policy.optimizer._masters.items()}))
    (chains, expected), (forest, grads) = found
    assert forest.loss == pytest.approx(chains.loss, rel=0.02)
    assert forest.num_tokens < chains.num_tokens
    torch.testing.assert_close(forest.logprobs, chains.logprobs, rtol=0.02, atol=0.15)
    whole = float(torch.nn.utils.get_total_norm(expected.values()))
    for name, grad in grads.items():
        assert float((grad - expected[name]).norm()) <= BF16_TOLERANCE * (float(expected[name].norm()) + 0.1 * whole), name


def test_a_pass_gives_the_same_bits_every_time(models):
    model = models["qwen3, tied, 2 heads to a key", "float32", False]
    algorithm, batch = step_of(siblings(12, [(7, 8, 9), (7, 8, 3), (7, 8, 9), (5,) * 20]))
    torch.use_deterministic_algorithms(True)
    try:
        (first, grads), (second, again) = (learn(model, batch, algorithm.loss, "forest", budget=40) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert first.loss == second.loss and torch.equal(first.logprobs, second.logprobs)
    assert all(torch.equal(grads[name], again[name]) for name in grads)


@pytest.mark.parametrize(("num_prompt", "picked"), [(20, "forest"), (6, "forest"), (4, "chains"), (1, "chains")])
def test_auto_picks_forests_where_they_save_enough_and_says_what_was_shared(models, num_prompt, picked):
    model = models["llama, untied", "float32", False]
    algorithm, batch = step_of(siblings(num_prompt, [(i,) * 15 for i in range(5)]))
    results = {rows: learn(model, batch, algorithm.loss, rows) for rows in ("auto", "forest", "chains")}
    found = results["auto"]
    assert found[0].num_tokens == results[picked][0].num_tokens
    assert all(torch.equal(found[1][name], grad) for name, grad in results[picked][1].items())
    saved = 4 * num_prompt / batch.num_tokens
    told = {rows: flatten(result[0].metrics)["train/shared"] for rows, result in results.items()}
    assert told == pytest.approx({"auto": saved if picked == "forest" else 0.0, "forest": saved, "chains": 0.0})


def test_only_samples_that_train_are_in_a_forest(models):
    model = models["llama, untied", "float32", False]
    batch = rollout()
    batch = batch.with_(weights=REDUCERS["token_mean"](batch))
    found, _ = learn(model, batch, sft_loss, "forest")
    assert len(trained(batch)) < batch.num_samples and found.num_tokens == num_prefixes(batch)
    assert relative(found.logprobs, learn(model, batch, sft_loss, "chains")[0].logprobs) < TOLERANCE["float32"]


class Elsewhere:
    """Attention over forests that is not what it should be."""

    def __init__(self, segments, device, dtype):
        self.row = ForestRow(segments, device)

    def __call__(self, layer, q, k, v, scale):
        return self.row(layer, q, k.detach() + 0.1 * k, v, scale)


def nowhere(segments, device, dtype):
    raise RuntimeError("no kernel\nfor this")


@pytest.mark.parametrize(("kernel", "fault"), [(Elsewhere, "away from attention over chains on cpu"), (nowhere, "RuntimeError: no kernel")])
def test_where_forests_are_not_chains_auto_takes_chains_and_says_so(models, monkeypatch, kernel, fault):
    model = models["llama, untied", "float32", False]
    algorithm, batch = step_of(siblings(20, [(i,) * 5 for i in range(5)]))
    assert backend(model, "auto").notes == []
    monkeypatch.setattr(forest_check, "forest_row", kernel)
    policy = backend(model, "auto")
    policy.optimizer = model
    found = policy.forward_backward(batch, algorithm.loss)
    model.hf.zero_grad()
    assert found.num_tokens == batch.num_tokens
    (note,) = policy.notes
    assert note.startswith("train.rows: chains, since attention over forests") and fault in note
    with pytest.raises(ValueError, match=rf"train\.rows is forest, but .*{fault}.*; use train\.rows=chains"):
        backend(model, "forest")
    assert backend(model, "chains").notes == []
