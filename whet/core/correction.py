"""Off-policy correction between engine and trainer: importance weights, and tokens and sequences that are rejected.

The ratio is pi_train / pi_rollout of the sampled tokens. A sequence is a sample. Weights carry no gradient: they change what
the expectation is over, not what it is of. Sources: truncated importance sampling, F. Yao et al., "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training", 2025; masked: J. Liu et al., "When Speed Kills Stability", 2025; IcePop: Ring-1T,
arXiv 2510.18855.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.choices import Correction, Level, Rejection, Statistic
from whet.core.losses import MAX_LOG_RATIO
from whet.core.segments import per_sample_count, per_sample_max, per_sample_mean, per_sample_sum
from whet.core.whiten import masked_mean


def sampling_log_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """log pi_train / pi_rollout of each token, detached. [T]"""
    return (train_logprobs - rollout_logprobs).detach()


def level_log_ratio(batch: TrainBatch, log_ratio: Tensor, level: Level) -> Tensor:
    """The log-ratio at a level, for each token of the batch; not clamped. [T]"""
    if level == "token":
        return log_ratio
    pooled = per_sample_sum(batch, log_ratio) if level == "sequence" else per_sample_mean(batch, log_ratio)
    return pooled[batch.sample_of_token]


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Importance weights and what became of the tokens. Each [T]."""

    raw: Tensor
    """Before any bound."""
    weights: Tensor
    """As the loss takes them."""
    keep: Tensor
    """False where a token is rejected. bool"""


def correct(batch: TrainBatch, log_ratio: Tensor, correction: Correction) -> ImportanceWeights:
    """Importance weights of every token, environment tokens too. The log-ratio is clamped to +-20."""
    pooled = level_log_ratio(batch, log_ratio, correction.level)
    raw = pooled.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = correction.bottom, correction.high
    inside = (raw >= low) & (raw <= high)
    keep = torch.ones_like(inside)
    if correction.bound == "truncate":
        weights = raw.clamp(max=high)
    elif correction.bound == "clip":
        weights = raw.clamp(low, high)
    elif correction.bound == "icepop":
        weights = raw.masked_fill(~inside, 0.0)
    else:
        weights, keep = raw, inside
    return ImportanceWeights(raw, weights, keep)


def geometric_weight(batch: TrainBatch, weights: Tensor) -> Tensor:
    """Each sample's geometric mean of its tokens' weights, for losses that have one ratio per sample. [T]"""
    return per_sample_mean(batch, (weights + 1e-10).log()).exp()[batch.sample_of_token]


def normalizer(batch: TrainBatch, weights: Tensor, level: Level, *, empty_counts: bool = False) -> float:
    """The mean weight of the batch, which weights are divided by so that their mean is 1; 1 where it is 0.

    Args:
        batch: the whole step.
        weights: [T]
        level: token: the mean over trained tokens; sequence: over samples.
        empty_counts: True: a sample without trained tokens counts as a weight of 0 (slime); False: it does not count (verl).
    """
    if level == "token":
        mean = float(masked_mean(weights, batch.loss_mask))
    else:
        count = batch.num_samples if empty_counts else int((per_sample_count(batch) > 0).sum())
        mean = float(per_sample_mean(batch, weights).sum()) / max(count, 1)
    return mean if mean > 1e-8 else 1.0


def divergence(batch: TrainBatch, log_ratio: Tensor, statistic: Statistic) -> Tensor:
    """A rejection statistic, for each token: d = log pi_rollout / pi_train as k1, d^2 / 2 as k2, exp(-d) - 1 + d as k3. [T]

    By itself (token_*), or its sum, mean or largest value over the sample.
    """
    pool, kind = statistic.split("_")
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    column = {"k1": -clamped, "k2": 0.5 * clamped.square(), "k3": clamped.expm1() - clamped}[kind]
    pools = {"sum": per_sample_sum, "mean": per_sample_mean, "max": per_sample_max}
    return column if pool == "token" else pools[pool](batch, column)[batch.sample_of_token]


def kept(batch: TrainBatch, log_ratio: Tensor, rejections: Sequence[Rejection]) -> Tensor:
    """True for the tokens that every criterion keeps. [T] bool"""
    keep = torch.ones_like(batch.loss_mask)
    for rejection in rejections:
        value = divergence(batch, log_ratio, rejection.statistic)
        low, high = rejection.bounds
        keep = keep & (value <= high)
        if rejection.of_ratio:
            keep = keep & (value >= low)
    return keep


def within(batch: TrainBatch, log_ratio: Tensor, level: Level, low: float, high: float) -> Tensor:
    """True where the ratio at a level is within [low, high]. [T] bool"""
    ratio = level_log_ratio(batch, log_ratio, level).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return (ratio >= low) & (ratio <= high)


def vetoed(batch: TrainBatch, log_ratio: Tensor, threshold: float) -> Tensor:
    """True for the tokens of a sample in which some trained token's ratio is below the threshold. [T] bool"""
    bad = batch.loss_mask & (log_ratio < math.log(threshold))
    return (per_sample_count(batch, bad) > 0)[batch.sample_of_token]
