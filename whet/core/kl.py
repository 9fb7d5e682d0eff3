"""Estimators of KL(policy || reference) from log-probs of sampled tokens, and the controller of its coefficient.

Source: J. Schulman, "Approximating KL divergence", 2020. The exponential of `k3` has its gradient at any distance, as the
policy loss has (`losses.ratio_of`); `low_var` is the one that stops where the policy is far from its reference.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from whet.core.choices import KLName
from whet.core.losses import MAX_EXPONENT

MAX_LOW_VAR = 10.0


def k1(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
    """log p - log q: unbiased, can be negative; as a loss its gradient is that of the log-likelihood, not of the KL."""
    return _weigh(logprobs - ref_logprobs, ratio)


def k2(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
    """(log p - log q)^2 / 2: biased, never negative, its gradient is the KL's."""
    return _weigh(0.5 * (logprobs - ref_logprobs).square(), ratio)


def k3(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, never negative. slime's k3; see `low_var` for verl's."""
    log_ratio = ref_logprobs - logprobs
    held = log_ratio.clamp(max=MAX_EXPONENT)
    # expm1 keeps the digits near 0; beyond float32's range its tangent goes on.
    beyond = held.exp().detach() * (log_ratio - held)
    return _weigh(held.expm1() + beyond - log_ratio, ratio)


def low_var(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
    """k3, at most 10 (weighted: within +-10), without gradient beyond. slime's and verl's low_var_kl, and what verl calls k3."""
    return k3(logprobs, ref_logprobs, ratio).clamp(-MAX_LOW_VAR, MAX_LOW_VAR)


def absolute(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor:
    """|log p - log q|: no estimate of the KL, but of how far apart the two are."""
    return _weigh((logprobs - ref_logprobs).abs(), ratio)


def _weigh(kl: Tensor, ratio: Tensor | None) -> Tensor:
    return kl if ratio is None else ratio * kl


class KLEstimator(Protocol):
    """The policy's and the reference's log-probs, and optionally pi / pi_old, to a term per token."""

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor | None = None) -> Tensor: ...


KL_ESTIMATORS: dict[KLName, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var": low_var, "abs": absolute}
"""With the ratio pi / pi_old and its gradient, value and gradient are both unbiased for tokens that pi_old sampled
(DeepSeek-V3.2, arXiv 2512.02556)."""


def adapted_kl_coef(coef: float, kl: float, num_samples: int, *, target: float, horizon: float) -> float:
    """The next coefficient: coef * (1 + clip(kl / target - 1, +-0.2) * num_samples / horizon).

    Source: arXiv 1909.08593, section 2.2. A KL under the target lowers the coefficient.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)
