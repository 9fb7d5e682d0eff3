"""Optimizer steps with a schedule and clipping, by torch's optimizers; float32 master weights where the model's are of lower precision,
or lie elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from whet.core.nonfinite import NonFinite
from whet.model.shards import spread_like, whole
from whet.observe.metrics import Last, Mean, Metrics
from whet.train.torch_native.config import OptimConfig
from whet.train.torch_native.optim_8bit import AdamW8bit, blocks_of, check_blocks
from whet.train.torch_native.optim_muon import SpreadMuon

IN_A_LAYER = re.compile(r"\.\d+\.")
"""Pattern in the name of a parameter of a numbered layer, as opposed to embedding and head."""
MatrixOptimizer = AdamW8bit | torch.optim.Muon
"""Optimizers that may step matrices in AdamW's place."""
FUSED = ("cpu", "cuda")
"""Devices on which AdamW's step is one kernel, without copies of what it steps."""


class Optimizer:
    """Steps a model's parameters.

    Parameters of lower precision than float32 get a float32 master: gradients are added up in float32 as each micro-batch's
    backward pass ends, the master is stepped, and the parameter is its rounding. With `offload` every parameter has one, in the CPU's
    memory, and so are gradients and moments.

    Args:
        named: the trainable parameters, by name.
        config: the settings.
        total_steps: length of the schedule.
        offload: see above.

    Raises:
        ValueError: if the optimizer cannot step such parameters.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], config: OptimConfig, total_steps: int, *, offload: bool = False) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self._params = dict(named)
        self._masters: dict[str, Tensor] = {}
        for name, param in self._params.items():
            own = param.dtype in (torch.float32, torch.float64) and not offload
            self._masters[name] = param if own else _master_of(param, torch.device("cpu") if offload else param.device)
        self.adamw, self._other = torch_optimizers(self._masters, config)
        self._of_other = {id(p) for group in (self._other.param_groups if self._other is not None else []) for p in group["params"]}

    @property
    def masters(self) -> list[Tensor]:
        """Tensors that are stepped: they hold the gradients."""
        return list(self._masters.values())

    @property
    def _steppers(self) -> list[torch.optim.Optimizer]:
        """torch's optimizers."""
        return [each for each in (self.adamw, self._other) if each is not None]

    def step(self, scale: float = 1.0) -> Metrics:
        """Clip, step, zero.

        Args:
            scale: factor of the loss whose gradients these are (`LossScale`).

        Raises:
            NonFinite: if the gradient norm is not finite; the weights are as they were.
        """
        groups = by_mesh(m for m in self._masters.values() if m.grad is not None)
        if scale != 1.0:
            for grad in (m.grad for group in groups for m in group if m.grad is not None):
                grad.div_(scale)
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
        for stepper in self._steppers:
            for group in stepper.param_groups:
                group["lr"] = lr
            stepper.step()
        self.zero_grad()
        self._round()
        self.steps += 1
        return {"optim/grad_norm": Mean(grad_norm, 1), "optim/lr": Last(lr)}

    def zero_grad(self) -> None:
        """Drop the gradients added up so far."""
        for stepper in self._steppers:
            stepper.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Moments and masters, by name, for checkpoints. A parameter that never had a gradient has step 0 and no moments; a master that is
        a copy of its parameter, bit for bit, is left out."""
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master.dtype != self._params[name].dtype:
                out[f"master/{name}"] = master.detach()
            for key, value in (self._stepper(name).state.get(master) or self._untouched(name)).items():
                out[f"{key}/{name}"] = value
        return out

    def possible_tensors(self) -> dict[str, Tensor]:
        """Everything that `tensors` may give, by name; what the entries hold is of no meaning."""
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            own = {"master": master} if master.dtype != self._params[name].dtype else {}
            out |= {f"{key}/{name}": tensor.detach() for key, tensor in (own | self._blank(name)).items()}
        return out

    def load_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Take over what `tensors` gave; the parameters are loaded already.

        Raises:
            ValueError: if a parameter's state is missing or of another shape.
        """
        self.steps = steps
        self.zero_grad()
        self.refresh_masters()
        for stepper in self._steppers:
            stepper.state.clear()
        for name, master in self._masters.items():
            if master.dtype != self._params[name].dtype:
                with torch.no_grad():
                    master.copy_(spread_like(_entry(tensors, "master", name, master), master))
            blank = self._blank(name)
            if "step" in blank:
                touched = bool(_entry(tensors, "step", name, blank["step"]) > 0)
            else:
                touched = any(f"{key}/{name}" in tensors for key in blank)
            if touched:
                state = {key: spread_like(_entry(tensors, key, name, like), like) for key, like in blank.items()}
                self._stepper(name).state[master] = {key: value.to(blank[key].device, copy=True) for key, value in state.items()}

    def check_saved(self, names: Collection[str]) -> None:
        """Refuse the names of a checkpoint's tensors where this optimizer cannot take over what they hold.

        Raises:
            ValueError: if moments of eight bits are in other blocks.
        """
        if self.config.name == "adamw_8bit":
            check_blocks(names, self._masters)

    def _stepper(self, name: str) -> torch.optim.Optimizer:
        """Which one steps a parameter."""
        stepper = self._other if id(self._masters[name]) in self._of_other else self.adamw
        assert stepper is not None
        return stepper

    def _blank(self, name: str) -> dict[str, Tensor]:
        """State of a parameter by entry; only shapes, types and devices of the entries have a meaning."""
        master, stepper = self._masters[name], self._stepper(name)
        if isinstance(stepper, AdamW8bit):
            return stepper.blank(master)
        if isinstance(stepper, torch.optim.Muon):
            return {"momentum_buffer": master}
        place = master.device if stepper.defaults["fused"] else torch.device("cpu")
        return {"step": torch.zeros((), device=place), "exp_avg": master, "exp_avg_sq": master}

    def _untouched(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter that never had a gradient."""
        return {} if isinstance(self._stepper(name), torch.optim.Muon) else {"step": torch.zeros(())}

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


def _total_norm(groups: list[list[Tensor]]) -> Tensor:
    """The norm of all gradients, each part of one counted once. 0-dim"""
    norms = [whole(torch.nn.utils.get_total_norm([m.grad for m in group if m.grad is not None])) for group in groups]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _master_of(param: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, in float32 at least, that collects the parameter's gradients."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    master = param.detach().to(device, dtype, copy=True).requires_grad_(True)

    def collect(p: Tensor) -> None:
        assert p.grad is not None
        grad = p.grad.to(device, dtype)
        master.grad = grad if master.grad is None else master.grad.add_(grad)
        p.grad = None

    param.register_post_accumulate_grad_hook(collect)
    return master


def _entry(tensors: Mapping[str, Tensor], key: str, name: str, like: Tensor) -> Tensor:
    tensor = tensors.get(f"{key}/{name}")
    if tensor is None:
        raise ValueError(
            f"the optimizer's checkpoint has no {key} of {name}: it was saved with another optim.name, or is of another model or dtype; "
            "set what it was saved with, or restore its weights alone"
        )
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        found, wanted = (f"{t.dtype} {tuple(t.shape)}" for t in (tensor, like))
        raise ValueError(f"the optimizer's checkpoint has {key} of {name} as {found}, not {wanted}")
    return tensor


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
        named: tensors that they step, by the parameters' names; of one device.
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
    """Parameters that AdamW does not step."""
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
