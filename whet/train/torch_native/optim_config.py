"""The optimizer's settings, its learning rate over the steps, and torch's optimizers for parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from whet.config import Config, refuse_unread

IN_A_LAYER = re.compile(r"\.\d+\.")
"""Of a parameter's name: that it is one of a numbered layer's, not of embedding or head."""
CUT_MATRICES = "optim.name=muon orthogonalizes whole matrices, and train.parallel cuts them over ranks; use adamw, or one device"
"""What is told of Muon on a mesh."""
FUSED = ("cpu", "cuda")
"""Devices on which AdamW's step is one kernel, without copies of what it steps."""


class OptimConfig(Config):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw (arXiv 1711.05101), by torch's fused kernels where the device has them; muon: layers' matrices are stepped by their
    orthogonalized momentum (arXiv 2502.16982), at AdamW's size of update, and all else by AdamW; on one device."""
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


def torch_optimizers(named: Mapping[str, Tensor], config: OptimConfig) -> tuple[torch.optim.AdamW | None, torch.optim.Muon | None]:
    """torch's optimizers of some parameters: AdamW, and Muon for layers' matrices if it is asked for. None: it has nothing to step.

    Args:
        named: what they step, by the parameters' names; of one device.
        config: the settings.

    Raises:
        ValueError: for Muon over ranks: its update is of whole matrices.
    """
    chosen = [name for name, p in named.items() if config.name == "muon" and p.dim() == 2 and IN_A_LAYER.search(name)]
    if any(isinstance(named[name], DTensor) for name in chosen):
        raise ValueError(CUT_MATRICES)
    muon = None
    if chosen:
        muon = torch.optim.Muon(
            [named[name] for name in chosen],
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
    groups: list[dict[str, Any]] = []
    for members in by_mesh(p for name, p in named.items() if name not in chosen):
        groups.append({"params": [m for m in members if m.dim() >= 2], "weight_decay": config.weight_decay})
        groups.append({"params": [m for m in members if m.dim() < 2], "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None, muon
    fused = all(p.device.type in FUSED for p in named.values())
    way = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **way), muon


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that one operation can take together: those that are spread over other ranks are apart. One list, if none is."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
