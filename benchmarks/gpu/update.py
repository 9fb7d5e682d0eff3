"""A forward and backward pass over one long row, and the optimizer's step: share of the device's peak (MFU), and memory beside the plan.

MFU is over the maker's figure (`whet.observe.devices`); the share of the product is over what the device was seen to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpu.ceilings import SIZES as PRODUCT_SIZES
from gpu.ceilings import product_tflops
from gpu.clock import forget, once, peak_gib, profiled
from gpu.models import batch_of_lengths, made, settings_of, shape_of
from gpu.record import Case
from whet.algo.sft import sft_loss
from whet.model.meta import meta_causal
from whet.observe.devices import peak_tflops
from whet.plan.memory import Workload, plan_memory
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Row:
    """What goes through the model."""

    size: str
    lengths: tuple[int, ...]
    checkpointing: bool = False

    @property
    def name(self) -> str:
        kind = f"{len(self.lengths)} x {self.lengths[0]} tokens" if len(self.lengths) > 1 else f"{self.lengths[0]} tokens"
        return f"{self.size}, {kind}{', checkpointing' if self.checkpointing else ''}"


SIZES = {
    "small": (Row("tiny", (96,)), Row("tiny", (96,), True)),
    "full": (Row("0.6B", (16_384,)), Row("0.6B", (512,) * 32), Row("0.6B", (16_384,), True)),
}
ROUNDS = 3


def cases(sizes: str, device: torch.device) -> list[Case]:
    out: list[Case] = []
    for row in SIZES[sizes]:
        out.append(Case(row.name, lambda row=row: measured(row, device, PRODUCT_SIZES[sizes][1])))
        out.append(Case(f"plan of {row.name}", lambda row=row: planned(row, device)))
    return out


def measured(row: Row, device: torch.device, side: int) -> Mapping[str, Any]:
    """Seconds, shares and memory of an update."""
    product = product_tflops(device, side)
    forget(device)
    model = made(row.size, device, trainable=True, checkpointing=row.checkpointing)
    backend = TorchBackend(model, settings(row), total_steps=100)
    batch = batch_of_lengths(list(row.lengths), model.vocab_size)
    passes, steps = list[float](), list[float]()
    for _ in range(ROUNDS + 1):  # the first one warms up
        before = backend.flops
        passes.append(once(lambda: backend.forward_backward(batch, sft_loss), device))
        operations = backend.flops - before
        steps.append(once(backend.optim_step, device))
    took = min(passes[1:])
    tflops = operations / took / 1e12
    peak = peak_tflops(torch.cuda.get_device_name(device), torch.bfloat16) if device.type == "cuda" else None
    return {
        "first_pass_s": round(passes[0], 3),
        "pass_s": round(took, 4),
        "optimizer_step_s": round(min(steps[1:]), 4),
        "tokens_per_s": round(sum(row.lengths) / took, 1),
        "tflops": round(tflops, 4),
        "mfu": round(tflops / peak, 3) if peak else None,
        "share_of_product": round(tflops / product, 3),
        "peak_gib": peak_gib(device),
        "profile": profiled(lambda: backend.forward_backward(batch, sft_loss), device, 1),
    }


def settings(row: Row) -> TrainConfig:
    return TrainConfig(max_tokens_per_device=sum(row.lengths), rows="chains")


def planned(row: Row, device: torch.device) -> Mapping[str, Any]:
    """What `whet plan` says of the same."""
    model = meta_causal(shape_of(row.size), settings_of(row.size, device, row.checkpointing))
    plan = plan_memory(model, Workload(settings(row), row.lengths))
    parts = {part.name: round(part.size_bytes / 2**30, 3) for part in plan.largest(6)}
    return {"planned_peak_gib": round(plan.peak_bytes / 2**30, 3), "planned_at": plan.peak, "planned_largest_gib": parts}
