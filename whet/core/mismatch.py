"""Distance of the trainer's policy from the engine's, measured on the tokens that the engine sampled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.losses import MAX_LOG_RATIO
from whet.core.segments import per_sample_mean, per_sample_sum
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
