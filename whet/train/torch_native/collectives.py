"""Differentiable exchanges between ranks that hold parts of one row, or parts of one vocabulary.

All ranks of a group compute the same loss from what was exchanged, so the gradient of a sum is handed through as it is, and the
gradient of what was put together is cut apart again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, size: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(size, *own.shape[1:]).index_copy_(0, places, own)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, scatter: int, gather: int) -> Tensor:
        ctx.settings = (group, scatter, gather)
        return _exchange(x, group, scatter, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        group, scatter, gather = ctx.settings
        return _exchange(grads[0], group, gather, scatter), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        own = grad.new_empty(len(grad) // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


def _exchange(x: Tensor, group: ProcessGroup, scatter: int, gather: int) -> Tensor:
    parts = torch.stack([part.contiguous() for part in x.chunk(dist.get_world_size(group), dim=scatter)])
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return torch.cat(list(out.unbind(0)), dim=gather)


def sum_over(part: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' parts, on each of them. Any shape"""
    return cast(Tensor, _Sum.apply(part, group))


def max_over(part: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of the ranks' numbers, without gradient. Any shape"""
    largest = part.detach().contiguous().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def together(own: Tensor, places: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """A column whose entries are spread over the ranks, whole on each of them; its gradient goes back to the owners.

    Args:
        own: this rank's entries. [n, ...]
        places: their indices. [n] int64
        size: entries of the column; each is one rank's.
        group: the ranks.
    """
    return cast(Tensor, _Together.apply(own, places, size, group))


def exchange(x: Tensor, group: ProcessGroup, *, scatter: int, gather: int) -> Tensor:
    """Cut one dimension over the ranks and put another one together, in the ranks' order (all-to-all)."""
    return cast(Tensor, _Exchange.apply(x, group, scatter, gather))


def gather_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' parts one after another: [t, ...] to [t * ranks, ...]. The gradients of all ranks' copies are added up."""
    return cast(Tensor, _Gather.apply(x, group))
