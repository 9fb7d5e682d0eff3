"""Sums over the tokens of a sample, and scans over the tokens of a trajectory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, as_list


def per_sample_sum(batch: TrainBatch, column: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of a per-token column over each sample's masked tokens (default: its trained ones). [N], differentiable"""
    mask = batch.loss_mask if mask is None else mask
    kept = torch.where(mask, column, torch.zeros_like(column))
    return torch.zeros(batch.num_samples, dtype=column.dtype, device=column.device).index_add(0, batch.sample_of_token, kept)


def per_sample_count(batch: TrainBatch, mask: Tensor | None = None) -> Tensor:
    """Masked tokens of each sample (default: trained ones). [N] int64"""
    mask = batch.loss_mask if mask is None else mask
    return torch.bincount(batch.sample_of_token[mask], minlength=batch.num_samples)


def per_sample_mean(batch: TrainBatch, column: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of a per-token column over each sample's masked tokens; 0 where it has none. [N], differentiable"""
    return per_sample_sum(batch, column, mask) / per_sample_count(batch, mask).clamp(min=1)


def per_sample_max(batch: TrainBatch, column: Tensor, mask: Tensor | None = None) -> Tensor:
    """Largest value over each sample's masked tokens; 0 where it has none. [N]"""
    mask = batch.loss_mask if mask is None else mask
    lowest = torch.full((batch.num_samples,), -math.inf, dtype=column.dtype, device=column.device)
    highest = lowest.scatter_reduce(0, batch.sample_of_token[mask], column[mask], "amax")
    return highest.masked_fill(highest == -math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Chains:
    """The tokens of every trajectory, its samples one after the other: credit flows across them in order."""

    index: Tensor
    """Token of the batch at each place. [T] int64"""
    lengths: Tensor
    """Tokens of each trajectory. [M] int64"""

    @property
    def starts(self) -> Tensor:
        """First place of each trajectory. [M] int64"""
        return self.lengths.cumsum(0) - self.lengths

    def put_back(self, column: Tensor) -> Tensor:
        """A column in chain order, back in batch order. [T]"""
        return torch.empty_like(column).index_copy_(0, self.index, column)


def chains_of(batch: TrainBatch) -> Chains:
    """Every trajectory's tokens in the order in which they were written."""
    by_order = batch.order.argsort(stable=True)
    samples = by_order[batch.trajectory[by_order].argsort(stable=True)]
    lengths = batch.lengths[samples]
    places = torch.arange(batch.num_tokens, device=lengths.device)
    index = places + torch.repeat_interleave(batch.starts[samples] - (lengths.cumsum(0) - lengths), lengths)
    totals = torch.bincount(batch.trajectory, weights=batch.lengths.double()).to(torch.int64)
    return Chains(index, totals[totals > 0])


def reverse_scan(terms: Tensor, decay: Tensor, lengths: Tensor) -> Tensor:
    """out[t] = terms[t] + decay[t] * out[t + 1] within each chain; the last place has out = terms. [T]

    One vector operation per place of the longest chain, and no padding: at place t from the end only the chains that
    reach so far take part.

    Args:
        terms: chains one after the other. [T]
        decay: [T]
        lengths: places of each chain. [M] int64
    """
    out = terms.clone()
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return out
    longest_first = lengths.argsort(descending=True)
    last = (lengths.cumsum(0) - 1)[longest_first]
    alive = torch.bincount(lengths)
    reach: list[int] = as_list(alive.flip(0).cumsum(0).flip(0))
    running = out[last]
    for t in range(1, len(reach) - 1):
        place = last[: reach[t + 1]] - t
        running = terms[place] + decay[place] * running[: reach[t + 1]]
        out[place] = running
    return out
