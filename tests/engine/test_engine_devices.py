"""What an engine does on devices that need not be at hand: threads and graphs are of its device, and no memory holds its weights twice."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from tests.engine.engine_setup import engine_of, serve_all, tiny
from whet.engine.embedded import static
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.paged import grouped_attention
from whet.engine.embedded.sampler import sample
from whet.model.causal import random_causal, torch_thread
from whet.model.config import ModelConfig
from whet.model.meta import copied_to
from whet.model.recompute import recompute_layers
from whet.types import Request, SamplingParams


def test_a_thread_has_the_device_that_it_was_made_for(monkeypatch):
    """CUDA's present device is each thread's own, and 0 at first: where a process works on another one, its threads must."""
    set_by: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: set_by.append((threading.current_thread().name, device)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for device in ("cuda:1", "cuda", "cpu"):
        with torch_thread(device, torch.device(device)) as thread:
            thread.submit(lambda: None).result()
    assert set_by == [("cuda:1_0", torch.device("cuda:1")), ("cuda_0", torch.device("cuda:3"))]


def test_a_copy_on_another_device_is_made_tensor_by_tensor(monkeypatch):
    """In memory there is never a second one of the whole model: eight workers of it would need eight."""
    model = tiny("qwen3", "float32")

    def refuse(storage, memo=None):
        raise AssertionError("the whole storage was copied in memory")

    monkeypatch.setattr(torch.UntypedStorage, "__deepcopy__", refuse)
    monkeypatch.setattr(torch.storage.TypedStorage, "__deepcopy__", refuse)
    moved = copied_to(model, torch.device("meta"))
    assert {p.device.type for p in (*moved.hf.parameters(), *moved.hf.buffers())} == {"meta"}
    own = copied_to(model, torch.device("cpu"))
    assert own.hf.get_input_embeddings().weight.data_ptr() != model.hf.get_input_embeddings().weight.data_ptr()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(own.named_state(), model.named_state(), strict=True))


class Recorded:
    """What stands in for CUDA's streams and graphs."""

    def __init__(self, *args, **options):
        self.options = options

    def wait_stream(self, other):
        pass


def test_graphs_are_captured_one_at_a_time_and_bear_with_other_threads(monkeypatch):
    captured = []

    @contextmanager
    def graph(into, **options):
        assert static.CAPTURING.locked()
        captured.append(options)
        yield

    @contextmanager
    def stream(beside):
        yield

    for name, value in {"Stream": Recorded, "CUDAGraph": Recorded, "graph": graph, "stream": stream, "current_stream": Recorded}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    core = EngineCore(tiny(), EmbeddedConfig(cache_tokens=64, block_size=4, max_running=2, max_batch_tokens=16, static_decode=True))
    core.add(Request("a", (1, 2, 3), SamplingParams(4)))
    core.step()
    core.step()
    (step,) = core._static._steps.values()
    with torch.inference_mode():
        step._capture()
    assert captured == [{"capture_error_mode": "thread_local"}] and not static.CAPTURING.locked()


def test_an_engine_over_layers_that_recompute_runs_them_plainly(monkeypatch):
    """Without gradients nothing is kept that could be recomputed; to save the random state would break a captured graph."""
    model = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device="cpu"), seed=0)
    requests = [Request(f"r{i}", (1, 2, 3 + i), SamplingParams(6, 0.0)) for i in range(3)]
    expected = serve_all(engine_of(model), requests)
    recompute_layers(model.hf, True)

    def refuse(*args, **kwargs):
        raise AssertionError("the random state was read")

    monkeypatch.setattr(torch, "get_rng_state", refuse)
    found = serve_all(engine_of(model, static_decode=True), requests)
    assert {name: reply.tokens for name, reply in found.items()} == {name: reply.tokens for name, reply in expected.items()}
    hidden = model.hidden(torch.tensor([1, 2, 3]), torch.arange(3), lambda layer, q, k, v, scale: v.repeat_interleave(2, 1))
    hidden.sum().backward()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_grouped_heads_attend_as_repeated_ones(heads, kv_heads):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(3, heads, 5, 8, generator=draw, dtype=torch.float64)
    keys = torch.randn(3, kv_heads, 9, 8, generator=draw, dtype=torch.float64)
    values = torch.randn(3, kv_heads, 9, 6, generator=draw, dtype=torch.float64)
    visible = torch.rand(3, 1, 5, 9, generator=draw) > 0.5
    visible[..., 0] = True
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(grouped_attention(q, keys, values, visible, 0.3), expected)


def test_no_running_sum_of_a_draw_is_one_of_fractions(monkeypatch):
    """CUDA has no deterministic one of those: `deterministic=true` would refuse it."""
    whole = torch.Tensor.cumsum

    def only_integers(x, *args, **kwargs):
        assert not x.is_floating_point(), "a running sum of fractions"
        return whole(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cumsum", only_integers)
    params = [SamplingParams(1, 1.0, seed=1), SamplingParams(1, 0.7, top_p=0.8, seed=2), SamplingParams(1, 1.0, top_k=3, top_p=0.5)]
    tokens, logprobs, _ = sample(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)), params, [5, 6, 7])
    assert all(0 <= token < 50 for token in tokens) and all(logprob < 0 for logprob in logprobs)
