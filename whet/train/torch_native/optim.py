"""Optimizer steps with a schedule and clipping; float32 master weights where the model's are of lower precision, or lie elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from whet.model.shards import spread_like, whole
from whet.observe.metrics import Last, Mean, Metrics
from whet.train.base import NonFinite
from whet.train.torch_native.optim_config import OptimConfig, by_mesh, lr_at, torch_optimizers


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
        self.adamw, self.muon = torch_optimizers(self._masters, config)
        self._of_muon = {id(p) for group in (self.muon.param_groups if self.muon is not None else []) for p in group["params"]}

    @property
    def masters(self) -> list[Tensor]:
        """What is stepped: it holds the gradients."""
        return list(self._masters.values())

    @property
    def _steppers(self) -> list[torch.optim.Optimizer]:
        """torch's optimizers."""
        return [each for each in (self.adamw, self.muon) if each is not None]

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
            if self._by_muon(name):
                out |= {f"momentum_buffer/{name}": state for state in self._state(name).values()}
                continue
            for key, value in (self._state(name) or {"step": torch.zeros(())}).items():
                out[f"{key}/{name}"] = value
        return out

    def possible_tensors(self) -> dict[str, Tensor]:
        """Everything that `tensors` may give, by name; what the entries hold is of no meaning."""
        out: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            own = {"master": master} if master.dtype != self._params[name].dtype else {}
            adamw = {"exp_avg": master, "exp_avg_sq": master, "step": torch.zeros(())}
            moments = {"momentum_buffer": master} if self._by_muon(name) else adamw
            out |= {f"{key}/{name}": tensor.detach() for key, tensor in (own | moments).items()}
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
            if self._by_muon(name):
                assert self.muon is not None
                if f"momentum_buffer/{name}" in tensors or f"step/{name}" in tensors:  # the latter: of AdamW, which is refused
                    self.muon.state[master] = {"momentum_buffer": _moment(tensors, "momentum_buffer", name, master)}
                continue
            step = _entry(tensors, "step", name, torch.zeros(()))
            if step > 0:
                assert self.adamw is not None
                moments = {key: _moment(tensors, key, name, master) for key in ("exp_avg", "exp_avg_sq")}
                place = master.device if self.adamw.defaults["fused"] else torch.device("cpu")
                self.adamw.state[master] = {"step": step.to(place, copy=True), **moments}

    def _by_muon(self, name: str) -> bool:
        return id(self._masters[name]) in self._of_muon

    def _state(self, name: str) -> dict[str, Tensor]:
        """torch's state of a parameter; empty if it never had a gradient."""
        stepper = self.muon if self._by_muon(name) else self.adamw
        assert stepper is not None
        return stepper.state.get(self._masters[name], {})

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


def _moment(tensors: Mapping[str, Tensor], key: str, name: str, master: Tensor) -> Tensor:
    return spread_like(_entry(tensors, key, name, master), master).to(master.device, copy=True)


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
