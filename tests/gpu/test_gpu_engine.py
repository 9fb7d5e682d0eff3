"""What only CUDA has in the engine: graphs that are captured and replayed, and draws by its kernels."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import Qwen3Config

from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import token_mean
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.sampler import sample
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Origin, Request, Sample, SamplingParams

pytestmark = pytest.mark.cuda
SHAPE = Qwen3Config(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
    max_position_embeddings=512, initializer_range=0.25, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
TOLERANCES = {"float64": 1e-8, "float32": 2e-3, "bfloat16": 0.3}


def model(device, dtype="float32", seed=0, **settings):
    return random_causal(SHAPE, ModelConfig(path="", dtype=dtype, device=str(device), **settings), seed=seed)


def core_of(held, *, static, **sizes):
    sizes = {"cache_tokens": 2048, "block_size": 4, "max_running": 16, "max_batch_tokens": 256} | sizes
    return EngineCore(held, EmbeddedConfig(**sizes, static_decode=static))


def asked():
    prompts = [tuple((5 * i + k) % 97 for k in range(1 + 6 * (i % 5))) for i in range(11)]
    return [Request(f"r{i}", prompt, SamplingParams(20, float(i % 3 > 0), seed=i, top_p=0.9)) for i, prompt in enumerate(prompts)]


def answers(core, requests=None):
    """Tokens and log-probs of every request."""
    sequences = [core.add(request) for request in requests or asked()]
    while core.has_work:
        for item in core.step():
            if item.finish is not None:
                core.finish(item.sequence)
    return [(s.tokens[len(s.request.tokens) :], list(s.logprobs)) for s in sequences]


def same(found, expected, tolerance, *, tokens=True):
    for (mine, logprobs), (theirs, wanted) in zip(found, expected, strict=True):
        assert not tokens or mine == theirs
        if mine == theirs:
            assert logprobs == pytest.approx(wanted, abs=tolerance)
    assert sum(a == b for (a, _), (b, _) in zip(found, expected, strict=True)) >= len(found) // 2


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_captured_steps_are_the_ordinary_ones(dtype, device):
    """In bfloat16 a token may be another where two are nearly as likely."""
    held = model(device, dtype)
    found, expected = answers(core_of(held, static=True)), answers(core_of(held, static=False))
    same(found, expected, TOLERANCES[dtype], tokens=dtype == "float64")


def test_a_captured_step_is_replayed_with_new_inputs(device):
    core = core_of(model(device, "float64"), static=True, max_running=3)
    first = answers(core)
    assert core._static is not None and any(step._graph is not None for step in core._static._steps.values()), "nothing was captured"
    core.drop_caches()
    assert answers(core) == first


def test_graphs_are_captured_anew_where_the_cache_lies_elsewhere_after_sleep(device):
    held = model(device, "float64")
    kept = {name: tensor.detach().clone() for name, tensor in held.named_weights()}
    core = core_of(held, static=True)
    before = answers(core)
    for version in (1, 2):
        core.sleep(weights=True)
        assert core._static is not None and not core._static._steps and core.store.size_bytes == 0
        beside = torch.full((2**22,), float("nan"), device=device)  # so that memory is found elsewhere
        core.wake()
        with torch.no_grad():
            for name, tensor in held.named_weights():
                tensor.copy_(kept[name])
        core.begin_version(version)
        assert answers(core) == before
        del beside


def test_weights_that_a_trainer_changes_in_place_are_read_by_the_captured_steps(device):
    held = model(device, "float64")
    core = core_of(held, static=True)
    before = answers(core)
    with torch.no_grad():
        for (_, tensor), (_, other) in zip(held.named_weights(), model(device, "float64", seed=1).named_weights(), strict=True):
            tensor.copy_(other)
    core.begin_version(1)
    expected = answers(core_of(model(device, "float64", seed=1), static=False))
    found = answers(core)
    assert found != before
    same(found, expected, 1e-8)


def group():
    samples = [
        Sample(tuple((7 * i + 3 * j) % 97 for j in range(40)), (Origin.PROMPT,) * 10 + (Origin.MODEL,) * 30, (False,) * 10 + (True,) * 30,
               (0.0,) * 40, (-1,) * 10 + (0,) * 30, "g", f"g/{i}")
        for i in range(4)
    ]  # fmt: skip
    batch = batch_of(samples)
    return batch.with_(weights=token_mean(batch))


@pytest.mark.parametrize("what", [True, "selective"])
def test_captured_steps_share_weights_with_a_trainer_that_checkpoints(what, device):
    held, plain = model(device, gradient_checkpointing=what), model(device)
    expected = answers(core_of(plain, static=False))
    core = core_of(held, static=True)
    same(answers(core), expected, 2e-3, tokens=False)
    config = TrainConfig(rows="chains")
    for each in (held, plain):
        TorchBackend(each, config, total_steps=2).forward_backward(group(), sft_loss)
    for (name, a), (_, b) in zip(held.hf.named_parameters(), plain.hf.named_parameters(), strict=True):
        assert float((a.grad - b.grad).norm() / b.grad.norm().clamp_min(1e-12)) < 1e-4, name
    core.drop_caches()
    same(answers(core), expected, 2e-3, tokens=False)


def test_steps_are_captured_while_another_thread_waits_for_the_device(device):
    """With `control.overlaps` the trainer's thread synchronises whenever it likes."""
    stop, faults, done = threading.Event(), [], []

    def trainer():
        a = torch.randn(256, 256, device=device)
        try:
            while not stop.is_set():
                float((a @ a).sum())
                torch.cuda.synchronize()
                done.append(torch.empty(1000 + len(done) % 100, device=device).numel())
        except Exception as error:  # whatever CUDA raises there
            faults.append(error)

    thread = threading.Thread(target=trainer)
    thread.start()
    try:
        found = answers(core_of(model(device, "float64"), static=True))
    finally:
        stop.set()
        thread.join(30)
    assert not faults and done
    same(found, answers(core_of(model(device, "float64"), static=False)), 1e-8)


@pytest.mark.cuda(devices=2)
def test_steps_on_a_second_device_are_captured_there():
    """In a thread whose current device is the first."""
    found = []
    thread = threading.Thread(target=lambda: found.append(answers(core_of(model("cuda:1", "float64"), static=True))))
    thread.start()
    thread.join(60)
    same(found[0], answers(core_of(model("cuda:0", "float64"), static=False)), 1e-8)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 12}, {"top_k": 900, "top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_draws_are_deterministic_and_those_of_a_cpu(options, device):
    logits = 3 * torch.randn(32, 5000, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(1, 0.9, seed=i, nucleus=bool(options), **options) for i in range(32)]
    places = list(range(32))
    torch.use_deterministic_algorithms(True)
    try:
        found = [sample(logits.to(device), params, places) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    tokens, logprobs, kept = sample(logits, params, places)
    assert found[0] == found[1]
    assert sum(a == b for a, b in zip(found[0][0], tokens, strict=True)) >= 31, "one may lie where rounding decides"
    for i, (mine, theirs) in enumerate(zip(found[0][0], tokens, strict=True)):
        if mine == theirs:
            assert found[0][1][i] == pytest.approx(logprobs[i], abs=1e-4)
            assert abs(len(found[0][2][i]) - len(kept[i])) <= 8
