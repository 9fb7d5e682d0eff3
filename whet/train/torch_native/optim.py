"""AdamW with a schedule and clipping; float32 master weights where the model's are of lower precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from whet.config import Config
from whet.model.shards import spread_like, whole
from whet.observe.metrics import Last, Mean, Metrics
from whet.train.base import NonFinite


class OptimConfig(Config):
    """AdamW (arXiv 1711.05101) and its schedule."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
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


class Optimizer:
    """Steps a model's parameters.

    Parameters of lower precision than float32 get a float32 master: gradients are added up in float32 as each micro-batch's
    backward pass ends, the master is stepped, and the parameter is its rounding.

    Args:
        named: the trainable parameters, by name.
        config: AdamW's settings.
        total_steps: length of the schedule.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], config: OptimConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self._params = dict(named)
        self._masters: dict[str, Tensor] = {}
        for name, param in self._params.items():
            self._masters[name] = param if param.dtype in (torch.float32, torch.float64) else _master_of(param)
        groups: list[dict[str, Any]] = []
        for members in by_mesh(self._masters.values()):
            groups.append({"params": [m for m in members if m.dim() >= 2], "weight_decay": config.weight_decay})
            groups.append({"params": [m for m in members if m.dim() < 2], "weight_decay": 0.0})
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, foreach=True
        )

    def step(self) -> Metrics:
        """Clip, step, zero.

        Raises:
            NonFinite: if the gradient norm is not finite; the weights are as they were.
        """
        groups = by_mesh(m for m in self._masters.values() if m.grad is not None)
        grad_norm = _total_norm(groups)
        if not bool(torch.isfinite(grad_norm)):
            names = [n for n, m in self._masters.items() if m.grad is not None and not bool(whole(m.grad.isfinite().all()))]
            self.zero_grad()
            raise NonFinite(
                f"the gradient norm is {float(grad_norm)}; parameters with such gradients: {', '.join(names[:5]) or 'none'}"
            )
        if self.config.clip_grad is not None:
            for group in groups:
                torch.nn.utils.clip_grads_with_norm_(group, self.config.clip_grad, grad_norm)
        lr = lr_at(self.config, self.steps, self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.zero_grad()
        self._round()
        self.steps += 1
        return {"optim/grad_norm": Mean(grad_norm, 1), "optim/lr": Last(lr)}

    def zero_grad(self) -> None:
        """Drop the gradients added up so far."""
        self.adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Moments and masters, by name, for checkpoints. A parameter that never had a gradient has step 0 and no moments."""
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._params[name]:
                out[f"master/{name}"] = master.detach()
            for key, value in self.adamw.state.get(master, {"step": torch.zeros(())}).items():
                out[f"{key}/{name}"] = value
        return out

    def possible_tensors(self) -> dict[str, Tensor]:
        """Everything that `tensors` may give, by name; what the entries hold is of no meaning."""
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            own = {"master": master} if master is not self._params[name] else {}
            like = {**own, "exp_avg": master, "exp_avg_sq": master, "step": torch.zeros(())}
            out |= {f"{key}/{name}": tensor.detach() for key, tensor in like.items()}
        return out

    def load_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take over what `tensors` gave.

        Raises:
            ValueError: if a parameter's state is missing or of another shape.
        """
        self.steps = steps
        self.zero_grad()
        self.adamw.state.clear()
        for name, master in self._masters.items():
            if master is not self._params[name]:
                with torch.no_grad():
                    master.copy_(spread_like(_entry(tensors, "master", name, master), master))
            step = _entry(tensors, "step", name, torch.zeros(()))
            if step > 0:
                moments = {
                    key: spread_like(_entry(tensors, key, name, master), master).to(master.device, copy=True)
                    for key in ("exp_avg", "exp_avg_sq")
                }
                self.adamw.state[master] = {"step": step.clone(), **moments}

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """The masters of weights that were just loaded: the weights themselves, at the masters' precision."""
        for name, master in self._masters.items():
            if master is not self._params[name]:
                master.copy_(self._params[name])

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self._masters.items():
            if master is not self._params[name]:
                self._params[name].copy_(master)


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that one operation can take together: those that are spread over other ranks are apart. One list, if none is."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def _total_norm(groups: list[list[Tensor]]) -> Tensor:
    """The norm of all gradients, each part of one counted once. 0-dim"""
    norms = [whole(torch.nn.utils.get_total_norm([m.grad for m in group if m.grad is not None])) for group in groups]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _master_of(param: Tensor) -> Tensor:
    """A float32 copy that collects the parameter's gradients."""
    master = param.detach().to(torch.float32).clone().requires_grad_(True)

    def collect(p: Tensor) -> None:
        assert p.grad is not None
        grad = p.grad.to(torch.float32)
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        p.grad = None

    param.register_post_accumulate_grad_hook(collect)
    return master


def _entry(tensors: Mapping[str, Tensor], key: str, name: str, like: Tensor) -> Tensor:
    tensor = tensors.get(f"{key}/{name}")
    if tensor is None:
        raise ValueError(f"the optimizer's checkpoint has no {key} of {name}; it is of another model or dtype")
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        found, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, like))
        raise ValueError(f"the optimizer's checkpoint has {key} of {name} as {found}, not {wanted}")
    return tensor
