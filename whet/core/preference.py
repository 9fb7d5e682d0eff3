"""Losses of preference pairs, as functions of one number per reply, and what makes a batch of pairs.

A batch of pairs holds each pair's chosen sample and then its rejected one; the column `unit` ties them together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from whet.core.batch import TrainBatch, batch_of
from whet.types import Pair


def pair_batch(pairs: Sequence[Pair]) -> TrainBatch:
    """Pairs as columns: chosen, rejected, chosen, rejected ..., every pair a unit. The weights are those of `pair_mean`."""
    batch = batch_of([sample for pair in pairs for sample in (pair.chosen, pair.rejected)])
    unit = torch.arange(len(pairs)).repeat_interleave(2)
    margin = torch.tensor([pair.margin for pair in pairs], dtype=torch.float32).repeat_interleave(2)
    batch = batch.with_(unit=unit, margin=margin)
    return batch.with_(weights=pair_mean(batch))


def split_pairs(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Indices of the chosen and of the rejected samples. [P], [P] int64"""
    assert batch.unit is not None, "a batch of pairs says which samples belong together"
    chosen = torch.arange(0, batch.num_samples, 2, device=batch.lengths.device)
    assert batch.num_samples % 2 == 0 and torch.equal(batch.unit[chosen], batch.unit[chosen + 1]), "a pair was split"
    return chosen, chosen + 1


def last_tokens(batch: TrainBatch) -> Tensor:
    """Index of each sample's last token. [N] int64"""
    return batch.starts + batch.lengths - 1


def pair_mean(batch: TrainBatch, total: float | None = None) -> Tensor:
    """Every pair counts the same: w = 1 / pairs of the step at the last token of its chosen sample, 0 elsewhere. [T] float32"""
    chosen, _ = split_pairs(batch)
    ends = last_tokens(batch)[chosen]
    weights = torch.zeros(batch.num_tokens, device=batch.lengths.device)
    weights[ends] = 1.0 / (len(chosen) if total is None else total)
    return weights


def place_terms(batch: TrainBatch, terms: Tensor) -> Tensor:
    """The pairs' terms [P] where `pair_mean` weighs them. [T]"""
    chosen, _ = split_pairs(batch)
    return torch.zeros(batch.num_tokens, dtype=terms.dtype, device=terms.device).index_copy(0, last_tokens(batch)[chosen], terms)


def sample_sums(batch: TrainBatch, per_token: Tensor, *, mean: bool = False) -> Tensor:
    """Each sample's sum over its trained tokens, or their mean. [N]"""
    masked = torch.where(batch.loss_mask, per_token, torch.zeros_like(per_token))
    owner = batch.sample_of_token
    sums = torch.zeros(batch.num_samples, dtype=per_token.dtype, device=per_token.device).index_add(0, owner, masked)
    if not mean:
        return sums
    counts = torch.bincount(owner[batch.loss_mask], minlength=batch.num_samples)
    return sums / counts.clamp(min=1)


def sigmoid_loss(logits: Tensor, margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - s) log sigmoid(z - m) - s log sigmoid(m - z): z is how much the chosen reply is ahead. [P]

    With z the difference of two scores: Bradley-Terry with a margin (Llama 2, arXiv 2307.09288, eq. 2). With z = beta h, h
    the difference of log-ratios: DPO (arXiv 2305.18290, eq. 7), with s its conservative form, with m its offset one (arXiv 2402.10571).
    """
    ahead = logits - margin
    return -(1 - label_smoothing) * F.logsigmoid(ahead) - label_smoothing * F.logsigmoid(-ahead)


def ipo_loss(ahead: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2 (IPO, arXiv 2310.12036, eq. 17, with tau = beta): h is the difference of log-ratios. [P]"""
    return (ahead - 1 / (2 * beta)) ** 2
