"""Distance of the trainer's policy from the engine's, measured on the tokens that the engine sampled.

Two forms: per-token columns that any reducer can average (slime), and numbers of the whole batch (verl).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.losses import MAX_LOG_RATIO
from whet.core.segments import per_sample_count, per_sample_mean, per_sample_sum
from whet.core.whiten import masked_mean


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Per sample [N] and per token [T]; samples without trained tokens have 0 where a mean would be."""

    train_log_ppl: Tensor
    """-mean log pi_train of the sample's trained tokens. [N]"""
    rollout_log_ppl: Tensor
    """-mean log pi_rollout. [N]"""
    kl: Tensor
    """log pi_rollout - log pi_train: k1 of KL(rollout || train). [T]"""
    k3_kl: Tensor
    """ratio - 1 - log ratio: k3 of it. [T]"""
    squared_ratio: Tensor
    """(pi_train / pi_rollout)^2; its mean less 1 is the chi-square divergence of single tokens. [T]"""
    squared_product: Tensor
    """(product of the sample's ratios)^2; its mean less 1 is that of whole sequences. [N]"""

    @property
    def log_ppl_difference(self) -> Tensor:
        """Logarithm of the ratio of perplexities, train over rollout. [N]"""
        return self.train_log_ppl - self.rollout_log_ppl


def mismatch_of(batch: TrainBatch, train_logprobs: Tensor, rollout_logprobs: Tensor) -> Mismatch:
    """Compare two sets of log-probs of the same tokens, in float64. Log-ratios that are squared are clamped to +-20 first."""
    train, rollout = train_logprobs.detach().double(), rollout_logprobs.detach().double()
    log_ratio = train - rollout
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    product = per_sample_sum(batch, log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return Mismatch(
        train_log_ppl=-per_sample_mean(batch, train),
        rollout_log_ppl=-per_sample_mean(batch, rollout),
        kl=-log_ratio,
        k3_kl=log_ratio.expm1() - log_ratio,
        squared_ratio=(2 * clamped).exp(),
        squared_product=(2 * product).exp(),
    )


def effective_sample_size(weights: Tensor, mask: Tensor) -> float | None:
    """1 / mean of (w / mean w)^2 over the masked tokens: the share of tokens that equal weights would be worth. None: every weight is 0."""
    mean = masked_mean(weights, mask)
    squares = float(masked_mean((weights / (mean + 1e-8)).square(), mask))
    return 1.0 / squares if squares > 0 else None


@dataclass(frozen=True, slots=True)
class Spread:
    """A statistic's distribution over trained tokens, and over samples that have any (or over all samples)."""

    mean: float
    lowest: float
    highest: float
    share_below: float
    """Share of tokens under the lower bound."""
    share_above: float
    std: float
    """Standard deviation of the values limited to the bounds."""
    sample_mean: float
    """Mean of the samples' means."""
    sample_std: float
    """With one less than their number in the denominator; 0 for one sample."""
    sample_lowest: float
    sample_highest: float
    sample_deviation: float
    """Largest distance of a sample's mean from the ideal value."""
    sample_share_below: float
    sample_share_above: float


def spread_of(
    batch: TrainBatch,
    values: Tensor,
    low: float,
    high: float,
    *,
    ideal: float = 0.0,
    all_samples: bool = False,
    per_sample: Tensor | None = None,
) -> Spread:
    """Summary of a per-token column over the trained tokens.

    Args:
        batch: with at least one trained token.
        values: [T]
        low: lower bound.
        high: upper bound.
        ideal: where no difference would be.
        all_samples: True if samples without trained tokens count, with the mean 0.
        per_sample: a sample's value; None: the mean over its trained tokens. [N]

    Raises:
        ValueError: if nothing trains.
    """
    mask = batch.loss_mask
    if not bool(mask.any()):
        raise ValueError("nothing trains here: there is no distribution to describe")
    trained = values[mask]
    limited = trained.clamp(low, high)
    variance = limited.square().mean() - limited.mean().square()
    means = per_sample_mean(batch, values) if per_sample is None else per_sample
    if not all_samples:
        means = means[per_sample_count(batch) > 0]
    return Spread(
        mean=float(trained.mean()),
        lowest=float(trained.min()),
        highest=float(trained.max()),
        share_below=float((trained < low).float().mean()),
        share_above=float((trained > high).float().mean()),
        std=float(variance.clamp(min=0).sqrt()),
        sample_mean=float(means.mean()),
        sample_std=float(means.std()) if len(means) > 1 else 0.0,
        sample_lowest=float(means.min()),
        sample_highest=float(means.max()),
        sample_deviation=float((means - ideal).abs().max()),
        sample_share_below=float((means < low).float().mean()),
        sample_share_above=float((means > high).float().mean()),
    )


def batch_mismatch(batch: TrainBatch, mismatch: Mismatch) -> dict[str, float]:
    """The mismatch as numbers of a whole batch: tokens weigh the same in the token ones, samples in the others.

    Raises:
        ValueError: if nothing trains.
    """
    mask, difference = batch.loss_mask, mismatch.log_ppl_difference
    if not bool(mask.any()):
        raise ValueError("nothing trains here: there are no log-probs to compare")
    return {
        "training_ppl": float(mismatch.train_log_ppl.exp().mean()),
        "training_log_ppl": float(mismatch.train_log_ppl.mean()),
        "rollout_ppl": float(mismatch.rollout_log_ppl.exp().mean()),
        "rollout_log_ppl": float(mismatch.rollout_log_ppl.mean()),
        "kl": float(masked_mean(mismatch.kl, mask)),
        "k3_kl": float(masked_mean(mismatch.k3_kl, mask)),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.exp().mean()),
        "chi2_token": float(masked_mean(mismatch.squared_ratio, mask)) - 1,
        "chi2_seq": float(mismatch.squared_product.mean()) - 1,
    }


