"""Tensors of which each rank of a mesh holds a part (DTensors), and the whole of them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor as every rank would hold it alone; of one that is spread, all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def here(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, over the same memory; all of one that is not spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor cut as another one is; every rank has the whole of it, so nothing is exchanged."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
