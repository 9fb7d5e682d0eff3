"""Policy losses: one term per token. The caller reduces with `sum(weights * terms)`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.choices import SequenceGradient
from whet.core.segments import per_sample_mean

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far outside every clip range, and finite in float32."""
MAX_EXPONENT = 80.0
"""exp(80) is 5e34: a thousandth of float32's range, which leaves room for what a ratio is multiplied by."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper clamp of a sequence's log-ratio, which is a mean over its tokens."""


@dataclass(frozen=True, slots=True)
class ClipTerms:
    """Per-token terms of a policy loss and what the clip did. Each [T]."""

    terms: Tensor
    ratio: Tensor
    """pi / pi_old as the loss sees it, detached."""
    clipped: Tensor
    """True where the clip took effect. For the clipped surrogates: the token has no gradient. bool"""
    dual: Tensor
    """True where it was the dual clip's ceiling that took effect; a part of `clipped`. bool"""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, with its gradient at any distance: beyond 80 the tangent goes on, so that neither is infinite. [T]"""
    held = log_ratio.clamp(max=MAX_EXPONENT)
    ratio = held.exp()
    return ratio + ratio.detach() * (log_ratio - held)


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> ClipTerms:
    """PPO's clipped surrogate, negated: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    With `clip_dual` c > 1 the term of a token with a negative advantage is at most -c A (dual clip, arXiv 1912.09729).
    Sources: arXiv 1707.06347, eq. 7; separate bounds (clip-higher): arXiv 2503.14476.
    """
    return clipped_terms(logprobs - old_logprobs, advantages, clip_low, clip_high, clip_dual)


def clipped_terms(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> ClipTerms:
    """`clipped_surrogate` of a log-ratio, be it a token's or a sequence's."""
    ratio = ratio_of(log_ratio)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    terms = torch.maximum(plain, bounded)
    clipped = bounded > plain
    over = torch.zeros_like(clipped)
    if clip_dual is not None:
        ceiling = -clip_dual * advantages
        over = (advantages < 0) & (terms > ceiling)
        terms = torch.where(over, ceiling, terms)
    return ClipTerms(terms, ratio.detach(), (clipped | over).detach(), over.detach())


def sequence_log_ratio(
    batch: TrainBatch, logprobs: Tensor, old_logprobs: Tensor, gradient: SequenceGradient = "token"
) -> Tensor:
    """GSPO's log-ratio: the mean of log pi / pi_old over the sample's trained tokens, for each of its tokens. [T]

    Source: arXiv 2507.18071, eq. 7 (sequence) and section 4.3 (token).
    """
    mean = per_sample_mean(batch, logprobs - old_logprobs)[batch.sample_of_token]
    if gradient == "sequence":
        return mean
    return (mean.detach() + logprobs - logprobs.detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> ClipTerms:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: the clip bounds a weight, and every token has a gradient.

    Source: arXiv 2506.13585, eq. 4.
    """
    ratio = ratio_of(logprobs - old_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return ClipTerms(-weight * advantages * logprobs, ratio, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool))


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> ClipTerms:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, a gate that closes softly; tau is by the sign of the advantage.

    On-policy its gradient is that of -r A. Source: arXiv 2511.20347.
    """
    ratio = ratio_of(logprobs - old_logprobs)
    tau = torch.where(advantages > 0, torch.full_like(ratio, tau_positive), torch.full_like(ratio, tau_negative)).detach()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return ClipTerms(-(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, ratio.detach(), never, never)


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> ClipTerms:
    """-A log pi: the plain policy gradient, without a ratio. GPG's loss (arXiv 2504.02546)."""
    never = torch.zeros_like(logprobs, dtype=torch.bool)
    return ClipTerms(-advantages * logprobs, ratio_of(logprobs - old_logprobs).detach(), never, never)


def geometric_mean(
    batch: TrainBatch, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> ClipTerms:
    """GMPO: -A exp(mean of clipped log r) of each sample, on each of its tokens. Reduce it with a mean
    over samples.

    A token's log-ratio is bounded by +clip_high if its advantage is positive, by -clip_low if it is
    negative; the sample's advantage is the mean over its trained tokens. `clipped` marks log-ratios out
    of bounds, for any sign of the advantage.

    Source: arXiv 2507.20673.
    """
    log_ratio = logprobs - old_logprobs
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    bounded = torch.where(advantages == 0, torch.zeros_like(bounded), bounded)
    owner = batch.sample_of_token
    ratio = ratio_of(per_sample_mean(batch, bounded))[owner]
    advantage = per_sample_mean(batch, advantages)[owner]
    clipped = ((log_ratio > clip_high) | (log_ratio < -clip_low)).detach()
    return ClipTerms(-advantage * ratio, ratio.detach(), clipped, torch.zeros_like(clipped))


def sequence_mask(batch: TrainBatch, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """OPSM: False for tokens with a negative advantage in samples whose mean of log pi_old - log pi exceeds delta. [T] bool

    Source: DeepSeek-V3.2, arXiv 2512.02556 (off-policy sequence masking).
    """
    drift = per_sample_mean(batch, (old_logprobs - logprobs).detach())
    return ~((drift > delta)[batch.sample_of_token] & (advantages < 0))


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """Per-token terms of the value loss. Each [T]."""

    terms: Tensor
    clipped: Tensor
    """True where the clipped prediction's error counts, so that the token has no gradient. bool"""
    moved: Tensor
    """True where the prediction moved by more than the clip range. bool"""


def value_loss(predicted: Tensor, values: Tensor, returns: Tensor, clip: float | None = None) -> ValueTerms:
    """max((V - G)^2, (V_old + clip(V - V_old, +-clip) - G)^2): slime's; verl's is half of it.

    Args:
        predicted: V, with gradient. [T]
        values: V_old, which the returns were made with. [T]
        returns: G. [T]
        clip: None: the plain squared error.
    """
    plain = (predicted - returns).square()
    if clip is None:
        never = torch.zeros_like(plain, dtype=torch.bool)
        return ValueTerms(plain, never, never)
    moved = (predicted - values).abs() > clip
    # Within the range it is the prediction itself, to the bit: a sum that rounds would look clipped.
    held = torch.where(moved, values + (predicted - values).clamp(-clip, clip), predicted)
    bounded = (held - returns).square()
    return ValueTerms(torch.maximum(plain, bounded), (bounded > plain).detach(), moved.detach())
