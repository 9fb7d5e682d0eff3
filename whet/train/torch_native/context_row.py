"""Attention where several ranks share one row: each computes some of its tokens, and sees what they need of the others'.

Two ways. Ulysses (arXiv 2309.14509): for the attention, each rank takes all tokens of some heads; any attention will do. Gather: each
rank takes all keys and values for its own queries; for any number of heads, and chains only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from whet.model.attention import Attend
from whet.train.torch_native.collectives import exchange, gather_rows, together
from whet.train.torch_native.config import ContextAttention


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share rows, as one of them sees it."""

    group: ProcessGroup
    rank: int
    size: int
    attention: ContextAttention

    @property
    def multiple(self) -> int:
        """Divisor of a row's length."""
        return self.size if self.attention == "ulysses" else 2 * self.size

    def places(self, num_tokens: int, rank: int) -> Tensor:
        """Which tokens of a row a rank computes. [num_tokens / size] int64

        In one stretch for Ulysses; else the zigzag: of 2 n stretches the r-th from either end, so that causal attention costs all ranks
        the same.
        """
        if self.attention == "ulysses":
            return torch.arange(num_tokens).chunk(self.size)[rank]
        stretches = torch.arange(num_tokens).chunk(2 * self.size)
        return torch.cat([stretches[rank], stretches[2 * self.size - 1 - rank]])


@dataclass(frozen=True, slots=True)
class RowPart:
    """The part of a row that one rank computes."""

    places: Tensor
    """[t] int64"""
    num_tokens: int
    """Tokens of the whole row."""
    group: ProcessGroup

    def where(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The places `wanted` in the row [L] that are computed here: their indices in `wanted`, and
        their indices in this rank's part. [l] int64"""
        index = torch.full((self.num_tokens,), -1, dtype=torch.int64, device=self.places.device)
        index[self.places] = torch.arange(len(self.places), device=self.places.device)
        here = index[wanted]
        chosen = (here >= 0).nonzero().squeeze(-1)
        return chosen, here[chosen]

    def whole(self, own: Tensor, places: Tensor, size: int) -> Tensor:
        """A column of `size` entries from those that each rank computed; its gradient goes back to where they were computed."""
        return together(own, places, size, self.group)


class UlyssesRow:
    """All tokens of some heads.

    Args:
        inner: attention over the whole row.
        context: the ranks that share it.
    """

    def __init__(self, inner: Attend, context: Context) -> None:
        self._inner, self._context = inner, context

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        size, group, heads = self._context.size, self._context.group, q.shape[1]
        if k.shape[1] % size:  # the ranks' queries share keys: each gets a copy of those that it needs
            copies = (size if size % k.shape[1] == 0 else heads) // k.shape[1]
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        q, k, v = (exchange(x, group, scatter=1, gather=0) for x in (q, k, v))
        return exchange(self._inner(layer, q, k, v, scale), group, scatter=0, gather=1)


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Queries of one segment that follow each other."""

    start: int
    """Index among this rank's tokens."""
    stop: int
    first_key: int
    """In the row: where their segment begins."""
    last_key: int
    """In the row: behind the last query."""


class GatheredRow:
    """All keys and values for this rank's queries.

    Args:
        lengths: lengths of the row's segments.
        context: the ranks that share it.
        device: device of the model.
    """

    def __init__(self, lengths: Sequence[int], context: Context, device: torch.device) -> None:
        num_tokens = sum(lengths)
        self._group = context.group
        order = torch.cat([context.places(num_tokens, rank) for rank in range(context.size)])
        self._inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(num_tokens)).to(device)
        self._runs = list(_runs(lengths, context))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = (gather_rows(x, self._group).index_select(0, self._inverse).transpose(0, 1)[None] for x in (k, v))
        queries, outs = q.transpose(0, 1)[None], []
        for run in self._runs:
            place = torch.arange(run.last_key - run.first_key, device=q.device)
            sees = place[None] <= place[run.start - run.stop :, None]
            stretch = slice(run.first_key, run.last_key)
            outs.append(
                F.scaled_dot_product_attention(
                    queries[:, :, run.start : run.stop],
                    keys[:, :, stretch],
                    values[:, :, stretch],
                    attn_mask=sees,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            )
        return torch.cat(outs, dim=2)[0].transpose(0, 1)


def _runs(lengths: Sequence[int], context: Context) -> Iterator[QueryRun]:
    places = context.places(sum(lengths), context.rank)
    half = len(places) // 2
    ends = list(accumulate(lengths))
    for offset, stretch in ((0, places[:half]), (half, places[half:])):
        begin, end = int(stretch[0]), int(stretch[-1]) + 1
        for length, stop in zip(lengths, ends, strict=True):
            a, b = max(begin, stop - length), min(end, stop)
            if a < b:
                yield QueryRun(offset + a - begin, offset + b - begin, stop - length, b)
