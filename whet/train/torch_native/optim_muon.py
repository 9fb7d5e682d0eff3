"""Muon over ranks: what it orthogonalizes is put together, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import _muon  # pyright: ignore[reportPrivateImportUsage]

from whet.model.shards import spread_like, whole


class SpreadMuon(torch.optim.Muon):
    """torch's Muon (arXiv 2502.16982) for matrices of which each rank may hold a part.

    Momentum and step are of a rank's own part. One matrix at a time, its update is put together on every rank, which orthogonalizes it
    and takes its part: as much is computed on each rank as on one alone, and nothing but the update is exchanged.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Every matrix that has a gradient; all ranks call it."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group)

    def _step(self, param: Tensor, grad: Tensor, how: dict[str, Any]) -> None:
        buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(grad))
        _here(buffer).lerp_(_here(grad), 1 - how["momentum"])
        update = _like(grad, _here(grad).lerp(_here(buffer), how["momentum"]))
        straight = _muon._zeropower_via_newtonschulz(whole(update), how["ns_coefficients"], how["ns_steps"], how["eps"])
        size = _muon._adjust_lr(how["lr"], how["adjust_lr_fn"], param.shape)
        own = _here(param)
        own.mul_(1 - how["lr"] * how["weight_decay"])
        own.add_(_here(spread_like(straight, param)), alpha=-size)


def _here(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(spread: Tensor, here: Tensor) -> Tensor:
    """A tensor that is spread as another one, of this rank's part."""
    if not isinstance(spread, DTensor):
        return here
    return DTensor.from_local(
        here, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )
