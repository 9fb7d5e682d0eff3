"""Decode steps at real shapes with random weights: tokens per second, launches and waits, and the share of the device's best copy.

Every sequence is in the middle of its reply. A step has to read the weights once, and the keys and values of every running sequence: their
bytes by its seconds are beside the copy that the device was seen to make.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu.ceilings import SIZES as COPY_SIZES
from gpu.ceilings import copy_gb_per_s
from gpu.clock import forget, peak_gib, profiled, wait
from gpu.models import made, shape_of, weight_bytes
from gpu.record import Case
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.model.causal import CausalModel
from whet.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    models: tuple[str, ...]
    nums: tuple[int, ...]
    """Sequences."""
    prompt: int
    """Tokens of each."""
    steps: int
    """That the clock runs."""


SIZES = {"small": Sizes(("tiny",), (1, 4), 12, 4), "full": Sizes(("0.6B", "8B"), (1, 16, 128), 512, 24)}
WARM = 3
"""Steps of decoding alone before the clock runs."""


class Models:
    """One model at a time, which is made when it is first wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, ""
        self._model: CausalModel | None = None

    def of(self, size: str) -> CausalModel:
        if self._model is None or size != self._size:
            self._model = None
            forget(self._device)
            self._model, self._size = made(size, self._device), size
        return self._model


def cases(sizes: str, device: torch.device) -> list[Case]:
    has, models = SIZES[sizes], Models(device)
    return [
        Case(
            f"{size}, {num} sequences, {'static' if static else 'ordinary'}",
            lambda size=size, num=num, static=static: measured(models.of(size), size, num, static, has, device, COPY_SIZES[sizes][0]),
        )
        for size in has.models
        for num in has.nums
        for static in (False, True)
    ]


def measured(
    model: CausalModel, size: str, num: int, static: bool, has: Sizes, device: torch.device, copy_bytes: int
) -> Mapping[str, Any]:
    """One core's steps."""
    forget(device)
    best = copy_gb_per_s(device, copy_bytes)
    began = time.perf_counter()
    core = core_of(model, num, static, has)
    ready = time.perf_counter() - began
    tokens_before = sum(sequence.num_cached_tokens for sequence in core.scheduler.running)
    wait(device)
    began = time.perf_counter()
    for _ in range(has.steps):
        core.step()
    wait(device)
    step_s = (time.perf_counter() - began) / has.steps
    decoding = [s for s in core.scheduler.running if s.num_pending_tokens == 1]
    assert len(core.scheduler.running) == len(decoding) == num, "not all of them were decoding"
    cached = tokens_before + num * has.steps // 2
    config = shape_of(size)
    live = cached * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    read = (weight_bytes(model) + live) / step_s / 1e9
    return {
        "tokens_per_s": round(num / step_s, 1),
        "step_ms": round(1000 * step_s, 3),
        "prefill_and_first_steps_s": round(ready, 2),
        "weights_gb": round(weight_bytes(model) / 1e9, 6),
        "live_kv_gb": round(live / 1e9, 6),
        "read_gb_per_s": round(read, 3),
        "copy_gb_per_s": best,
        "share_of_copy": round(read / best, 3),
        "peak_gib": peak_gib(device),
        "profile": profiled(core.step, device, 2),
    }


def core_of(model: CausalModel, num: int, static: bool, has: Sizes) -> EngineCore:
    """A core with so many sequences in the middle of their replies."""
    left = WARM + has.steps + 8
    room = 2 * num * (has.prompt + left + 32)  # rows for decoding have up to twice a sequence's length
    sizes = EmbeddedConfig(cache_tokens=room, block_size=16, max_running=num, max_batch_tokens=8192, compiled=False, static_decode=static)
    core = EngineCore(model, sizes)
    for i in range(num):
        prompt = tuple((7 * i + 3 * j) % model.vocab_size for j in range(has.prompt))
        core.add(Request(str(i), prompt, SamplingParams(left + 64, 1.0, seed=i)))
    while core.scheduler.waiting or min(sequence.num_sampled for sequence in core.scheduler.running) < 1 + WARM:
        core.step()
    return core
