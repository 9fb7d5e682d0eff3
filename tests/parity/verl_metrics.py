"""Numbers of a whole batch in the form that verl logs them: spread of a statistic, and mismatch of two policies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.mismatch import Mismatch
from whet.core.segments import per_sample_count, per_sample_mean
from whet.core.whiten import masked_mean


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
    mask, difference = batch.loss_mask, mismatch.train_log_ppl - mismatch.rollout_log_ppl
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
