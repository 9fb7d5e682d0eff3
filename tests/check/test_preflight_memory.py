"""The plan against the tensors of real runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.check.real_memory import Alive, as_wide_as_the_vocabulary, batch, deepseek, pair, qwen3, qwen3_moe
from whet.algo.sft import sft_loss
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.engine import EmbeddedEngine
from whet.plan.memory import Sampling, Workload, checkpoint_bytes, largest_row, plan_memory
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.train.torch_native.packing import pack
from whet.types import Request, SamplingParams

pytestmark = pytest.mark.long

SHAPES = {
    "tied": lambda: qwen3(tie_word_embeddings=True),
    "untied": lambda: qwen3(tie_word_embeddings=False),
    "experts": qwen3_moe,
    "latent": deepseek,
}
LENGTHS = [60, 60, 60]
ENGINE = EmbeddedConfig(cache_tokens=330, block_size=16, max_running=6, max_batch_tokens=64)


def nbytes(tensors):
    return sum(t.nbytes for t in tensors)


def trained(model, train):
    """A backend after one step, and the bytes of its gradients before it."""
    backend = TorchBackend(model, train, total_steps=5)
    backend.forward_backward(batch(LENGTHS), sft_loss)
    gradients = nbytes(p.grad for p in backend.optimizer.masters if p.grad is not None)
    backend.optim_step()
    return backend, gradients


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16")), ("tied", "float64")]
)
def test_parameters_gradients_and_optimizer_are_those_of_a_run(shape, dtype):
    meta, model = pair(SHAPES[shape](), dtype=dtype)
    train = TrainConfig(max_tokens_per_device=180)
    plan = plan_memory(meta, Workload(train, (60, 60, 60)))
    backend, gradients = trained(model, train)
    kept = backend.optimizer.tensors()
    assert plan.bytes_of("parameters") == nbytes(p for _, p in backend.named_weights())
    assert plan.bytes_of("gradients") == gradients
    assert plan.bytes_of("float32 masters") == nbytes(t for key, t in kept.items() if key.startswith("master/"))
    assert (plan.bytes_of("float32 masters") > 0) == (dtype == "bfloat16")
    assert plan.bytes_of("optimizer moments") == nbytes(t for key, t in kept.items() if key.startswith("exp_avg"))


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_an_optimizer_step_takes_is_planned(dtype, name):
    meta, model = pair(qwen3(), dtype=dtype)
    train = TrainConfig(max_tokens_per_device=180, optim={"name": name})
    backend, _ = trained(model, train)
    backend.forward_backward(batch(LENGTHS), sft_loss)
    weights, gradients = (p for _, p in model.named_weights()), (m.grad for m in backend.optimizer.masters)
    with Alive().ignore([*backend.optimizer.tensors().values(), *weights, *gradients]) as alive:
        backend.optim_step()
    planned = plan_memory(meta, Workload(train, (60,))).bytes_of("optimizer scratch")
    assert planned == pytest.approx(alive.peak, rel=0.1, abs=4096)  # norms, one by one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_has_the_bytes_that_are_planned(shape, dtype, tmp_path):
    meta, model = pair(SHAPES[shape](), dtype=dtype)
    backend, _ = trained(model, TrainConfig(max_tokens_per_device=180))
    backend.save(tmp_path)
    files = (load_file(tmp_path / f"{name}.safetensors") for name in ("weights", "optimizer"))
    assert checkpoint_bytes(meta, TrainConfig()) == sum(nbytes(tensors.values()) for tensors in files)


def played(model, params, num):
    """An engine after a short rollout, and the peak of what is as wide as the vocabulary."""
    with ThreadPoolExecutor(1) as thread:
        engine = EmbeddedEngine(model, ENGINE, thread, shares_weights=True, deterministic=False)
        for i in range(num):
            engine.core.add(Request(f"r{i}", (1, 2, 3 + i), params, f"c{i}"))
        with Alive(as_wide_as_the_vocabulary).ignore(p for _, p in model.named_weights()) as alive:
            for _ in range(3):
                engine.core.step()
        return engine, alive.peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_is_that_of_a_rollout(shape, dtype):
    meta, model = pair(SHAPES[shape](), dtype=dtype)
    params = SamplingParams(max_tokens=8)
    engine, _ = played(model, params, 2)
    plan = plan_memory(meta, Workload(TrainConfig(), (60,), sampling=Sampling(ENGINE, (params,), 2, 60)))
    assert plan.bytes_of("KV cache") == engine.core.store.size_bytes > 0
    rests = plan_memory(meta, Workload(TrainConfig(), (60,), sampling=Sampling(ENGINE, (params,), 2, 60, sleeps=True)))
    assert plan.at("backward") - rests.at("backward") == plan.bytes_of("KV cache") and plan.at("rollout") == rests.at("rollout")


@pytest.mark.parametrize(("num", "new_tokens"), [(1, 4), (4, 60), (4, 90), (6, 90), (1, 300)])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rows_for_decoding_are_those_of_a_rollout(shape, num, new_tokens):
    """In the last case a row of 512 places is more than the cache of 336 tokens: the reply ends without one."""
    meta, model = pair(SHAPES[shape]())
    engine = EngineCore(model, EmbeddedConfig(cache_tokens=330, block_size=16, max_running=6, max_batch_tokens=64))
    for i in range(num):
        engine.add(Request(f"r{i}", (1, 2, 3 + i), SamplingParams(new_tokens), f"c{i}"))
    most = 0
    while engine.has_work:
        for item in engine.step():
            most = max(most, engine.rows.size_bytes)
            if item.finish is not None:
                engine.finish(item.sequence)
    sampling = Sampling(ENGINE, (SamplingParams(new_tokens),), num, 3 + new_tokens)
    plan = plan_memory(meta, Workload(TrainConfig(), (60,), sampling=sampling))
    assert plan.bytes_of("decode rows") == pytest.approx(most, rel=0.1)
    assert engine.rows.size_bytes == 0, "nobody decodes any more"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5}], ids=str
)
def test_the_logits_of_sampling_are_those_of_a_rollout(params, dtype):
    meta, model = pair(qwen3(), dtype=dtype)
    chosen = SamplingParams(max_tokens=8, **params)
    _, peak = played(model, chosen, ENGINE.max_running)
    sampling = Sampling(ENGINE, (SamplingParams(8, 0.0), chosen), ENGINE.max_running, 60)
    plan = plan_memory(meta, Workload(TrainConfig(), (60,), sampling=sampling))
    assert plan.bytes_of("sampling logits") == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(("entropy_grad", "nucleus"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("chunk", [20, 1000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["tied", "untied"])
def test_the_logits_of_training_are_those_of_a_step(shape, dtype, chunk, entropy_grad, nucleus):
    meta, model = pair(SHAPES[shape](), dtype=dtype)
    train = TrainConfig(max_tokens_per_device=180, logprob_chunk_tokens=chunk)
    backend = TorchBackend(model, train, total_steps=1)

    def loss(part, out):
        terms = sft_loss(part, out)
        return terms if not entropy_grad else type(terms)(terms.terms + out.entropy, terms.metrics)

    step = batch(LENGTHS)
    if nucleus:
        step = step.with_(nucleus_sizes=torch.ones_like(step.tokens), nucleus_ids=step.tokens.int())
    with Alive(as_wide_as_the_vocabulary).ignore(p for _, p in model.named_weights()) as alive:
        backend.forward_backward(step, loss, entropy_grad=entropy_grad)
    plan = plan_memory(meta, Workload(train, (60, 60, 60), entropy_grad=entropy_grad, nucleus=nucleus))
    assert plan.bytes_of("logits") == pytest.approx(alive.peak, rel=0.1)


@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_update_peaks_where_the_plan_says(dtype, recompute):
    """Gradients, logits and activations together: the estimate's part is the largest here."""
    meta, model = pair(qwen3(num_hidden_layers=6), dtype=dtype, gradient_checkpointing=recompute)
    train = TrainConfig(max_tokens_per_device=240, logprob_chunk_tokens=24)
    backend = TorchBackend(model, train, total_steps=1)
    with Alive().ignore(p for _, p in model.named_weights()) as alive:
        backend.forward_backward(batch([80, 80, 80, 80, 80, 80]), sft_loss)
    plan = plan_memory(meta, Workload(train, (80, 80, 80)))
    held = plan.at("rollout")
    assert max(plan.at("loss"), plan.at("backward")) - held == pytest.approx(alive.peak, rel=0.15)


def test_recomputing_layers_keeps_less():
    ways = [{}, {"gradient_checkpointing": True, "gradient_checkpointing_every": 3}, {"gradient_checkpointing": "selective"},
            {"gradient_checkpointing": True}]  # fmt: skip
    plans = [plan_memory(pair(qwen3(num_hidden_layers=6), **way)[0], Workload(TrainConfig(), (100,))) for way in ways]
    kept = [plan.bytes_of("activations kept") for plan in plans]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert plans[3].bytes_of("activations in the backward pass") < plans[0].bytes_of("activations in the backward pass")


def test_planning_leaves_the_model_as_it_was():
    meta, _ = pair(qwen3(), dtype="bfloat16")
    work = Workload(TrainConfig(), (100,), reference=True, sampling=Sampling(ENGINE, (SamplingParams(8),), 4, 60))
    first, second = plan_memory(meta, work), plan_memory(meta, work)
    assert first == second
    assert all(p.grad is None and p.is_meta for p in meta.hf.parameters())


def test_a_reference_is_another_set_of_parameters_and_the_engine_has_none_of_its_own():
    meta, _ = pair(qwen3())
    alone = plan_memory(meta, Workload(TrainConfig(), (100,)))
    both = plan_memory(meta, Workload(TrainConfig(), (100,), reference=True, sampling=Sampling(ENGINE, (SamplingParams(8),), 4, 60)))
    assert alone.bytes_of("reference model") == 0
    assert both.bytes_of("reference model") == both.bytes_of("parameters")
    assert both.bytes_of("engine weights") == 0 and "engine weights" in [part.name for part in both.parts]
    assert alone.at("step") + both.bytes_of("reference model") + both.bytes_of("KV cache") == both.at("step")


def test_the_peak_is_the_fullest_phase_and_its_largest_parts_are_named():
    meta, _ = pair(qwen3())
    plan = plan_memory(meta, Workload(TrainConfig(), (400,)))
    assert plan.peak_bytes == max(plan.at(phase) for phase in ("rollout", "loss", "backward", "step")) == plan.at(plan.peak)
    sizes = [part.size_bytes for part in plan.largest(3)]
    assert sizes == sorted((part.size_bytes for part in plan.parts if plan.peak in part.during), reverse=True)[:3]
    assert all(part.advice for part in plan.largest(9))


@given(longest=st.integers(1, 60), budget=st.integers(1, 100), lengths=st.data())
def test_no_packed_row_is_longer_than_the_planned_one(longest, budget, lengths):
    samples = lengths.draw(st.lists(st.integers(1, longest), min_size=1, max_size=12))
    planned = largest_row((longest,), budget, len(samples))
    assert max(planned) <= max(longest, budget) and len(planned) <= len(samples)
    for row in pack(samples, budget):
        assert sum(samples[i] for i in row) <= max(sum(planned), longest)


def test_a_planned_row_is_one_that_can_be():
    assert largest_row((10,), 100, 4) == (10, 10, 10, 10)
    assert largest_row((30,), 100, 9) == (30, 30, 30, 10)
    assert largest_row((30,), 100, 3) == (30, 30, 30)
    assert largest_row((200,), 100, 9) == (200,)
    assert largest_row((20, 10), 100, 9) == (20, 10, 20, 10, 20, 10, 10)
    assert largest_row((33,), 100, 9) == (33, 33, 33, 1)
