"""Policy losses: one term per token. The caller reduces with `sum(weights * terms)`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: far outside every clip range, and finite in float32."""


@dataclass(frozen=True, slots=True)
class ClipTerms:
    """Per-token terms of the clipped surrogate and what the clip did. Each [T]."""

    terms: Tensor
    ratio: Tensor
    """pi / pi_old, detached."""
    clipped: Tensor
    """True where the clipped branch was taken, so that the token has no gradient. bool"""


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
    The log-ratio is clamped to +-20. Sources: arXiv 1707.06347, eq. 7; separate bounds (clip-higher): arXiv 2503.14476.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    terms = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if clip_dual is not None:
        ceiling = -clip_dual * advantages
        over = (advantages < 0) & (terms > ceiling)
        terms = torch.where(over, ceiling, terms)
        clipped = clipped | over
    return ClipTerms(terms, ratio.detach(), clipped.detach())
