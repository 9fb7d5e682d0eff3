"""The optimal token baseline: for each step of a group, the baseline that makes the gradient's variance least."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.choices import Align
from whet.core.segments import chains_of
from whet.types import Origin


def optimal_token_baseline(
    batch: TrainBatch,
    returns: Tensor,
    logprobs: Tensor,
    *,
    align: Align = "action",
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """B_t = sum(G_t W_t) / sum(W_t) over the group's trajectories that have a step t; 0 for a group of one. [T] float64

    W_t = sum over the steps j <= t of 1 - 2 p_j + sum_v p_j(v)^2 estimates the squared norm of the score up to t: that is
    the squared norm of d log p_j / d logits. With correction weights each addend is multiplied by its squared weight.

    Args:
        batch: with `squared_probs`, and `correction` where the loss is weighted.
        returns: the return from each token on. [T]
        logprobs: log-probs under the policy that is improved. [T]
        align: tokens that count as the same step.
        zero_tail: no baseline where only the longest trajectory goes on: it would be its own return.
        eps: added to the denominator.

    Raises:
        ValueError: if the batch has no `squared_probs`.
    """
    if batch.squared_probs is None:
        raise ValueError("the optimal token baseline needs the sums of squared probabilities, and this batch has none")
    chains = chains_of(batch)
    owner = torch.repeat_interleave(torch.arange(len(chains.lengths), device=chains.lengths.device), chains.lengths)
    trained, sample = batch.loss_mask[chains.index], batch.sample_of_token[chains.index]
    energy = 1 - 2 * logprobs.double().exp() + batch.squared_probs.double()
    if batch.correction is not None:
        energy = energy * batch.correction.double().square()
    weight = _running(torch.where(trained, energy[chains.index], 0.0), chains.starts, owner)
    counted = trained if align == "action" else batch.origin[chains.index] != int(Origin.PROMPT)
    step = _running(counted.double(), chains.starts, owner).to(torch.int64) - 1

    bins = batch.group[sample] * (int(step.max()) + 1) + step.clamp(min=0)
    used = trained & batch.valid[sample]
    gain, total = torch.zeros(2, int(bins.max()) + 1, dtype=torch.float64, device=bins.device)
    gain.index_add_(0, bins[used], (weight * returns.double()[chains.index])[used])
    total.index_add_(0, bins[used], weight[used])
    baseline = (gain / (total + eps))[bins]

    length = torch.zeros_like(chains.lengths).index_add_(0, owner, trained.to(torch.int64))
    compared = length.masked_fill(length == 0, -1) if align == "action" else length
    alone, second = _rivals(batch.group[sample[chains.starts]], compared)
    baseline = baseline.masked_fill(alone[owner], 0.0)
    if zero_tail:
        baseline = baseline.masked_fill((length > second)[owner] & (step >= second[owner]), 0.0)
    return chains.put_back(baseline)


def _running(column: Tensor, starts: Tensor, owner: Tensor) -> Tensor:
    """Cumulative sum that restarts in each chain."""
    total = column.cumsum(0)
    return total - (total - column)[starts][owner]


def _rivals(group: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """For each trajectory: whether it is its group's only one, and the longest length among its rivals. [M], [M]

    A length of -1 is no rival.
    """
    same = (group[:, None] == group[None, :]) & ~torch.eye(len(group), dtype=torch.bool, device=group.device) & (length >= 0)[None, :]
    second = torch.where(same, length[None, :], torch.full_like(length, -1)[None, :]).max(1).values
    return ~same.any(1), second
