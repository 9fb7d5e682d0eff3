"""Choices of the settings in `core`: names of its functions, and bounds. Importable without torch, as
settings are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

KLName = Literal["k1", "k2", "k3", "low_var", "abs"]
ReducerName = Literal["token_mean", "sample_mean", "group_mean", "token_sum_mean", "sequence_mean", "sequence_sum"]
ScaledReducerName = Literal["constant", "constant_length"]
"""These divide by a number of the user's."""
SequenceGradient = Literal["token", "sequence"]
"""Path of the gradient of a sequence's ratio. token: through each token's own log-prob (GSPO-token;
verl); sequence: through the mean over the sequence (GSPO; slime). They differ only if advantages or
weights differ within a sequence."""
CreditOver = Literal["actions", "all"]
"""actions: the trained tokens are the time steps (verl's convention); all: so are the environment's (slime's)."""
RewardAt = Literal["last_action", "last_token"]
Align = Literal["action", "position"]
"""Tokens that count as the same step in two trajectories. action: their n-th trained token (verl's
tir_optimal_token_baseline); position: the n-th token after the prompt, of any origin (verl's
optimal_token_baseline)."""
Level = Literal["token", "sequence", "geometric"]
"""Level of a ratio: each token's, the product over the sample, or the root of the product (the
geometric mean)."""
Bound = Literal["truncate", "clip", "icepop", "mask"]
"""Treatment of weights outside the bounds. truncate: the weight is at most `high`; clip: it is within
[low, high]; icepop: it is 0; mask: it stays, and the token is rejected."""
Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "sum_k1", "sum_k2", "sum_k3", "mean_k1", "mean_k2", "mean_k3", "max_k2", "max_k3"
]



class Clip(IntEnum):
    """Reason why a sampled token has no gradient of the policy loss, or a bounded one. One code for each token of a step."""

    NONE = 0
    """The token has the gradient of its term."""
    HIGH = 1
    """Its ratio is above the upper bound."""
    LOW = 2
    """Its ratio is below the lower bound."""
    DUAL = 3
    """Its term is at the ceiling of the dual clip."""
    COVARIANCE = 4
    """A covariance criterion holds it back (clip_cov, kl_cov)."""
    SEQUENCE = 5
    """Off-policy sequence masking dropped it (`algo.mask_delta`)."""
    REJECTED = 6
    """Off-policy correction rejected it."""
    TOO_OLD = 7
    """A policy over the staleness bound sampled it."""
    UNUSABLE = 8
    """Its sample teaches nothing: the trajectory failed, or has no valid sibling to be compared with."""
    MASKED = 9
    """The loss mask left it out: `batch.train_on`, `batch.process`, or `control.too_old=drop`."""
    SKIPPED = 10
    """Its sample has no gradient, so no pass computed it (`batch.skip_zero_advantage`)."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Settings of importance weights."""

    level: Level = "token"
    bound: Bound = "truncate"
    high: float = 2.0
    low: float | None = None
    """None: 1 / high."""

    def __post_init__(self) -> None:
        if not 0 <= self.bottom < self.high:
            raise ValueError(f"importance weights are bounded by low < high, but low is {self.bottom} and high is {self.high}")

    @property
    def bottom(self) -> float:
        """The lower bound."""
        return 1.0 / self.high if self.low is None else self.low


@dataclass(frozen=True, slots=True)
class Rejection:
    """Tokens are kept where a statistic is within its bounds."""

    statistic: Statistic
    high: float
    """Largest value. For k1: of the ratio pi_rollout / pi_train, and the bound is its logarithm."""
    low: float | None = None
    """For k1: smallest ratio; None: 1 / high. The others have no lower bound."""

    def __post_init__(self) -> None:
        if self.high <= 0 or (self.low is not None and self.low <= 0):
            raise ValueError(f"{self.statistic}: bounds must be positive, not {self.low} and {self.high}")
        if self.low is not None and not self.of_ratio:
            raise ValueError(f"{self.statistic} has an upper bound alone: it is never negative, so leave out low={self.low}")

    @property
    def of_ratio(self) -> bool:
        return self.statistic.endswith("k1")

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the statistic itself."""
        if not self.of_ratio:
            return 0.0, self.high
        return math.log(1.0 / self.high if self.low is None else self.low), math.log(self.high)
