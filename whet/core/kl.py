"""Estimators of KL(policy || reference) from log-probs of sampled tokens.

Source: J. Schulman, "Approximating KL divergence", 2020. The log-ratio is clamped to +-20, as in the policy loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from whet.core.losses import MAX_LOG_RATIO

KLName = Literal["k1", "k2", "k3"]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, can be negative."""
    return _log_ratio(logprobs, ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, never negative, its gradient is the KL's."""
    return 0.5 * _log_ratio(logprobs, ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, never negative."""
    log_ratio = -_log_ratio(logprobs, ref_logprobs)
    return log_ratio.expm1() - log_ratio


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return (logprobs - ref_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


KL_ESTIMATORS: dict[KLName, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
