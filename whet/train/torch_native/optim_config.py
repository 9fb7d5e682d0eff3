"""The optimizer's settings, its learning rate over the steps, and torch's optimizers for parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from whet.config import Config, refuse_unread
from whet.train.torch_native.optim_8bit import AdamW8bit, blocks_of
from whet.train.torch_native.optim_muon import SpreadMuon

IN_A_LAYER = re.compile(r"\.\d+\.")
"""Of a parameter's name: that it is one of a numbered layer's, not of embedding or head."""
MatrixOptimizer = AdamW8bit | torch.optim.Muon
"""What may step matrices in AdamW's place."""
FUSED = ("cpu", "cuda")
"""Devices on which AdamW's step is one kernel, without copies of what it steps."""


class OptimConfig(Config):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw (arXiv 1711.05101), by torch's fused kernels where the device has them; adamw_8bit: matrices of 4096 entries and more on
    a rank keep their moments in eight bits (arXiv 2110.02861, by torchao: `whet[8bit]`), and all else is adamw's; muon: layers' matrices
    are stepped by their orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, and all else is adamw's."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of muon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; not applied to vectors (norms, biases)."""
    clip_grad: float | None = Field(default=1.0, gt=0)
    """Gradient norm that is not exceeded; unset: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, over the run's optimizer steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that linear and cosine end at."""

    @model_validator(mode="after")
    def _read(self) -> OptimConfig:
        if self.name != "muon":
            refuse_unread(self, ["momentum"], f"with name={self.name}", "set name=muon")
        return self


def lr_at(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total_steps`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps, 1)
    done = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "linear":
        share = 1.0 - done
    else:
        share = 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def torch_optimizers(named: Mapping[str, Tensor], config: OptimConfig) -> tuple[torch.optim.AdamW | None, MatrixOptimizer | None]:
    """The optimizers of some parameters: torch's AdamW, and another one for the matrices that it is for, if it is asked for. None: it has
    nothing to step.

    Args:
        named: what they step, by the parameters' names; of one device.
        config: the settings.

    Raises:
        ValueError: if torchao is asked for and not installed.
    """
    chosen = _matrices(named, config)
    other = _optimizer_of(chosen.values(), config) if chosen else None
    groups: list[dict[str, Any]] = []
    for members in by_mesh(p for name, p in named.items() if name not in chosen):
        groups.append({"params": [m for m in members if m.dim() >= 2], "weight_decay": config.weight_decay})
        groups.append({"params": [m for m in members if m.dim() < 2], "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None, other
    fused = all(p.device.type in FUSED for p in named.values())
    way = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **way), other


def _matrices(named: Mapping[str, Tensor], config: OptimConfig) -> dict[str, Tensor]:
    """Those that AdamW does not step."""
    if config.name == "adamw_8bit":
        return {name: p for name, p in named.items() if blocks_of(p) is not None}
    if config.name == "muon":
        return {name: p for name, p in named.items() if p.dim() == 2 and IN_A_LAYER.search(name)}
    return {}


def _optimizer_of(matrices: Collection[Tensor], config: OptimConfig) -> MatrixOptimizer:
    if config.name == "adamw_8bit":
        return AdamW8bit(matrices, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
    how = {"momentum": config.momentum, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    muon = SpreadMuon if any(isinstance(p, DTensor) for p in matrices) else torch.optim.Muon
    return muon(matrices, lr=config.lr, **how)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that one operation can take together: those that are spread over other ranks are apart. One list, if none is."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
