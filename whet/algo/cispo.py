"""CISPO: GRPO's advantages, and a clip that bounds the importance weight, so that every token keeps its gradient. arXiv 2506.13585."""

from __future__ import annotations

from pydantic import Field

from whet.algo.grpo import GRPOConfig
from whet.algo.surrogates import LossConfig
from whet.core.weights import ReducerName, ScaledReducerName


class CISPOConfig(GRPOConfig):
    """CISPO's settings."""

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low: with 1 there is no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is at most 1 + clip_high."""
    reducer: ReducerName | ScaledReducerName = "token_mean"
    """token_mean: every token counts the same."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="cispo"))
    """The policy loss."""
