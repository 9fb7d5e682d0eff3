"""GMPO: GRPO's advantages, and the geometric mean of clipped ratios of a sequence. arXiv 2507.20673."""

from __future__ import annotations

from pydantic import Field

from whet.algo.grpo import GRPOConfig
from whet.algo.surrogates import LossConfig


class GMPOConfig(GRPOConfig):
    """GMPO's settings."""

    clip_low: float = Field(default=0.4, ge=0)
    """Smallest log-ratio of a token with a negative advantage: -clip_low."""
    clip_high: float = Field(default=0.4, ge=0)
    """Largest log-ratio of a token with a positive advantage."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="geometric_mean"))
    """The policy loss."""
