"""Attention computed in parts, each over some of the keys that a query sees, and joined; from matrix products alone.

A part's softmax is over its own keys; the logarithm of its sum tells what share it has of the whole (arXiv 2205.14135, section 3.1). In
the backward pass the whole's logarithm gives the probabilities of every part again, so none are kept (section B.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class Own:
    """Chunks of similar length, each of which attends to itself causally: a right-padded block."""

    gather: Tensor
    """Row index of each place; T where it is padding. [num * length] int64"""
    num: int
    length: int


@dataclass(frozen=True, slots=True)
class Cross:
    """A stretch of queries that all see the whole of a stretch of keys."""

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Every query of a row with every key that it sees, once. Each token is in one `Own`."""

    own: Sequence[Own]
    cross: Sequence[Cross]


def joined_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, parts: AttentionParts) -> Tensor:
    """Attention over a row, computed in float32 at least.

    Args:
        q: [T, heads, D].
        k: [T, kv_heads, D]; v: [T, kv_heads, Dv].
        scale: factor of the scores.
        parts: the queries and keys that see each other.

    Returns:
        [T, heads, Dv].
    """
    return _JoinedAttention.apply(q, k, v, scale, parts)  # pyright: ignore[reportReturnType]


class _JoinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, parts: AttentionParts) -> Tensor:
        queries, keys, values = (_grouped(x, k.shape[1]) for x in (q, k, v))
        queries *= scale
        groups = queries.shape[1]
        out = queries.new_zeros(*queries.shape[:3], v.shape[-1])
        logsum = queries.new_zeros(*queries.shape[:3], 1)
        for own in parts.own:
            query, key, value = (_block(x, own) for x in (queries, keys, values))
            found, logs = _softmax(query, key, value, _future(own, groups, queries.device))
            _put(out, found, own)
            _put(logsum, logs, own)
        for cross in parts.cross:
            here, before = out[:, :, cross.queries], logsum[:, :, cross.queries]
            found, logs = _softmax(queries[:, :, cross.queries].flatten(1, 2), keys[:, 0, cross.keys], values[:, 0, cross.keys], None)
            found, logs = found.view_as(here), logs.view_as(before)
            both = torch.logaddexp(before, logs)
            here.mul_((before - both).exp_()).add_(found.mul_((logs - both).exp_()))
            before.copy_(both)
        result = _ungrouped(out, q.dtype)
        ctx.scale, ctx.parts = scale, parts
        ctx.save_for_backward(q, k, v, result, logsum)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, logsum = ctx.saved_tensors
        queries, keys, values, pull, drift = (_grouped(x, k.shape[1]) for x in (q, k, v, pulls[0], out))
        queries *= ctx.scale
        drift = drift.mul_(pull).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(x) for x in (queries, keys, values))
        for own in ctx.parts.own:
            query, key, value, pulled, logs, drifted = (_block(x, own) for x in (queries, keys, values, pull, logsum, drift))
            future = _future(own, queries.shape[1], queries.device)
            found = _softmax_backward(query, key, value, pulled, logs, drifted, future)
            for gradient, part in zip((dq, dk, dv), found, strict=True):
                _put(gradient, part, own)
        for cross in ctx.parts.cross:
            query, pulled, logs, drifted = (x[:, :, cross.queries].flatten(1, 2) for x in (queries, pull, logsum, drift))
            found = _softmax_backward(query, keys[:, 0, cross.keys], values[:, 0, cross.keys], pulled, logs, drifted, None)
            here = dq[:, :, cross.queries]
            here += found[0].view_as(here)
            dk[:, 0, cross.keys] += found[1]
            dv[:, 0, cross.keys] += found[2]
        dq *= ctx.scale
        return _ungrouped(dq, q.dtype), _ungrouped(dk, k.dtype), _ungrouped(dv, v.dtype), None, None


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[T, heads, D] to [kv_heads, the heads that share each, T + 1, D]; the last row is 0, for padding."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(kv_heads, x.shape[1] // kv_heads, x.shape[0] + 1, x.shape[2], dtype=wide)
    out[:, :, :-1] = x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    return out


def _ungrouped(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x[:, :, :-1].permute(2, 0, 1, 3).flatten(1, 2).to(dtype)


def _block(x: Tensor, own: Own) -> Tensor:
    """[K, G, T + 1, D] to [K, num, G * length, D]."""
    return x.index_select(2, own.gather).unflatten(2, (own.num, own.length)).transpose(1, 2).flatten(2, 3)


def _put(target: Tensor, block: Tensor, own: Own) -> None:
    """The inverse of `_block`; what the padding holds ends in the last row."""
    rows = block.unflatten(2, (-1, own.length)).transpose(1, 2).flatten(2, 3)
    target.index_copy_(2, own.gather, rows)


def _future(own: Own, groups: int, device: torch.device) -> Tensor:
    return torch.ones(own.length, own.length, dtype=torch.bool, device=device).triu(1).repeat(groups, 1)


def _softmax(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [..., R, Dv] and log-sum [..., R, 1] of queries [..., R, D] over keys [..., S, D]."""
    scores = q @ k.transpose(-1, -2)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    total = scores.sub_(top).exp_().sum(-1, keepdim=True)
    return (scores @ v).div_(total), total.log_().add_(top)


def _softmax_backward(
    q: Tensor, k: Tensor, v: Tensor, pull: Tensor, logsum: Tensor, drift: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from that of the joined output. `drift` is sum(pull * joined output) of each query."""
    probs = (q @ k.transpose(-1, -2)).sub_(logsum).exp_()
    if hidden is not None:
        probs.masked_fill_(hidden, 0.0)
    dv = probs.transpose(-1, -2) @ pull
    dscores = (pull @ v.transpose(-1, -2)).sub_(drift).mul_(probs)
    return dscores @ k, dscores.transpose(-1, -2) @ q, dv
