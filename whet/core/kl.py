"""Estimators of KL(policy || reference) from log-probs of sampled tokens (J. Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

KLName = Literal["k1", "k2", "k3"]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, can be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, never negative, its gradient is the KL's."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, never negative."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1 - log_ratio


KL_ESTIMATORS: dict[KLName, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
