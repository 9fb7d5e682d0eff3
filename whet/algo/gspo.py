"""GSPO: GRPO's advantages, and a ratio of whole sequences: the geometric mean of their tokens' ratios. arXiv 2507.18071."""

from __future__ import annotations

from pydantic import Field

from whet.algo.grpo import GRPOConfig
from whet.algo.surrogates import LossConfig


class GSPOConfig(GRPOConfig):
    """GSPO's settings."""

    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence's ratio is clipped from below at 1 - clip_low; it is far closer to 1 than a token's."""
    clip_high: float = Field(default=4e-4, ge=0)
    """And from above at 1 + clip_high."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="sequence"))
    """The policy loss."""
