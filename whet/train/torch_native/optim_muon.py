"""Muon over ranks: what it orthogonalizes is put together, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import _muon  # pyright: ignore[reportPrivateImportUsage]

from whet.model.shards import here, spread_like, whole


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
        here(buffer).lerp_(here(grad), 1 - how["momentum"])
        update = _like(grad, here(grad).lerp(here(buffer), how["momentum"]))
        straight = _muon._zeropower_via_newtonschulz(whole(update), how["ns_coefficients"], how["ns_steps"], how["eps"])
        size = _muon._adjust_lr(how["lr"], how["adjust_lr_fn"], param.shape)
        own = here(param)
        own.mul_(1 - how["lr"] * how["weight_decay"])
        own.add_(here(spread_like(straight, param)), alpha=-size)


def _like(spread: Tensor, part: Tensor) -> Tensor:
    """A tensor that is spread as another one, of this rank's part."""
    if not isinstance(spread, DTensor):
        return part
    return DTensor.from_local(
        part, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )
