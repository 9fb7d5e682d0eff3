"""SAPO: GRPO's advantages, and a gate on the ratio that closes softly instead of a clip. arXiv 2511.20347."""

from __future__ import annotations

from pydantic import Field

from whet.algo.grpo import GRPOConfig
from whet.algo.surrogates import LossConfig


class SAPOConfig(GRPOConfig):
    """SAPO's settings; its gate is no clip, so clip_low and clip_high are refused."""

    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="sapo"))
    """The policy loss, with its tau_positive and tau_negative."""
