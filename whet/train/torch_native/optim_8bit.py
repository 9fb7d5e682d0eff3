"""AdamW with moments of eight bits (arXiv 2110.02861): codes in blocks of 256 entries with a scale each, by torchao's arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from whet.model.shards import here, spread_like

BLOCK = 256
"""Entries that share a scale, as in torchao's AdamW8bit."""
LEAST = 4096
"""Entries of a matrix, or of a rank's part of one, below which eight bits spare nothing: the same as in torchao."""
PIECE = 2**22
"""Entries that are in full precision at a time; a multiple of `BLOCK`."""
MOMENTS = ("exp_avg", "exp_avg_sq")
LEAST_CODES = (0, 1)
"""The lowest code that a moment may have. Where torchao rounds a second moment to 0 and the first is not 0, an entry without a gradient in
the next step would move by first moment / eps, hundreds of learning rates: here it is the least value above 0 instead."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Division of a matrix's entries into blocks.

    Two layouts with equal tags cut one matrix into the same blocks, so that one's codes and scales are
    the other's.
    """

    tag: str
    scales: tuple[int, ...]
    """Shape of the whole matrix's scales, which are cut over ranks as the matrix is."""

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Names of each moment's codes and scales."""
        return [(f"{moment}.codes", f"{moment}.scale.{self.tag}") for moment in MOMENTS]


def blocks_of(p: Tensor) -> Blocks | None:
    """The blocks of a float32 matrix's moments, within each rank's part. None: they stay in float32, on every rank.

    That is so for vectors, for parts of fewer than `LEAST` entries or no whole number of blocks, and where ranks have parts of other sizes.
    """
    local = _local_shape(p)
    if p.dim() < 2 or p.dtype != torch.float32 or local is None or math.prod(local) < LEAST:
        return None
    if local[-1] % BLOCK == 0:
        return Blocks(str(BLOCK), (*p.shape[:-1], p.shape[-1] // BLOCK))
    inner = math.prod(local[1:])
    rows = BLOCK // math.gcd(BLOCK, inner)
    cut_inside = p.shape[1:] != local[1:]
    if local[0] % rows or (cut_inside and p.dim() > 2):
        return None
    parts = math.prod(p.shape[1:]) // inner
    return Blocks("x".join(map(str, (rows, *local[1:]))), (p.shape[0] // rows, parts * rows * inner // BLOCK))


def _local_shape(p: Tensor) -> torch.Size | None:
    """Shape of the part that each rank has. None: the parts differ."""
    shape = list(p.shape)
    if isinstance(p, DTensor):
        for size, placement in zip(p.device_mesh.shape, p.placements, strict=True):
            if isinstance(placement, Shard | _StridedShard):
                if shape[placement.dim] % size:
                    return None
                shape[placement.dim] //= size
    return torch.Size(shape)


class AdamW8bit(torch.optim.Optimizer):
    """Steps matrices that have blocks: moments are read into float32 and moved on, the weights step by them, and they are rounded again.

    Args:
        params: parameters that it steps; DTensors by each rank's part.
        lr, betas, eps, weight_decay: as torch's AdamW has them.

    Raises:
        ValueError: if torchao is not installed.
    """

    def __init__(self, params: Iterable[Tensor], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        if find_spec("torchao") is None:
            raise ValueError("optim.name=adamw_8bit needs the torchao package: pip install 'whet[8bit]', or use adamw")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._maps: dict[torch.device, list[Tensor]] = {}

    @staticmethod
    def blank(p: Tensor) -> dict[str, Tensor]:
        """The state of a matrix before its first step: sharded as the matrix is, on the same devices."""
        blocks = blocks_of(p)
        assert blocks is not None
        state = {"step": torch.zeros(())}
        for codes, scale in blocks.keys:
            state[codes] = torch.zeros_like(p, dtype=torch.uint8, requires_grad=False)
            state[scale] = spread_like(torch.zeros(blocks.scales, device=p.device), p).to(p.device)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of every matrix that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group)

    def _step(self, p: Tensor, group: Mapping[str, Any]) -> None:
        from torchao.optim.adam import single_param_adam
        from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

        blocks, state = blocks_of(p), self.state[p] or self.blank(p)
        assert blocks is not None and p.grad is not None
        self.state[p] = state
        step, (beta1, beta2) = state["step"].add_(1), group["betas"]
        weight, grad = _flat(p), _flat(p.grad)
        moments = [
            (_flat(state[codes]), _flat(state[scale]), values)
            for (codes, scale), values in zip(blocks.keys, self._values(p.device), strict=True)
        ]
        for start in range(0, len(weight), PIECE):
            piece, scales = slice(start, start + PIECE), slice(start // BLOCK, (start + PIECE) // BLOCK)
            first, second = (dequant_with_qmap(codes[piece], values, scale[scales]) for codes, scale, values in moments)
            decays = (beta1, beta2, group["weight_decay"], group["eps"])
            single_param_adam(weight[piece], grad[piece], step, first, second, None, group["lr"], *decays, True, False)
            for moment, (codes, scale, values), least in zip((first, second), moments, LEAST_CODES, strict=True):
                scaled, scale[scales] = scale_tensor(moment, BLOCK)
                codes[piece] = quantize_8bit_with_qmap(scaled, values).clamp_(min=least)

    def _values(self, device: torch.device) -> list[Tensor]:
        """Values of the codes of the first and of the second moment, to be multiplied by the scale.
        [256] each"""
        from torchao.optim.quant_utils import create_dynamic_map

        if device not in self._maps:
            self._maps[device] = [torch.tensor(create_dynamic_map(signed), device=device) for signed in (True, False)]
        return self._maps[device]


def _flat(tensor: Tensor) -> Tensor:
    """The entries that lie here, one after another, in the same memory."""
    return here(tensor).view(-1)


def check_blocks(saved: Iterable[str], masters: Mapping[str, Tensor]) -> None:
    """Refuse moments that were saved in other blocks: rounding them again would change them.

    Args:
        saved: names of a checkpoint's tensors, each `key/parameter`.
        masters: the stepped tensors, by parameter.

    Raises:
        ValueError: with the first such parameter.
    """
    found: dict[str, set[str]] = {}
    for key, _, name in (each.partition("/") for each in saved):
        if key.partition(".")[0] in MOMENTS:
            found.setdefault(name, set()).add(key)
    for name, master in masters.items():
        blocks = blocks_of(master)
        own: set[str] = {key for pair in blocks.keys for key in pair} if blocks is not None else set(MOMENTS)
        if (saved_keys := found.get(name, own)) != own:
            raise ValueError(
                f"the optimizer's checkpoint has the moments of {name} {_described(saved_keys)}, and this layout has them "
                f"{_described(own)}: rounded anew they would be others. Resume with the layout that it was saved with, or begin a "
                "run with its weights alone (checkpoint.restore)"
            )


def _described(keys: set[str]) -> str:
    tags = {key.partition(".scale.")[2] for key in keys} - {""}
    return f"in blocks of {' and '.join(sorted(tags))} entries" if tags else "in float32"
