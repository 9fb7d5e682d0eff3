"""GPG: the plain policy gradient with the group's mean as baseline, scaled up for groups that teach nothing. arXiv 2504.02546."""

from __future__ import annotations

from pydantic import Field

from whet.algo.base import StepPlan
from whet.algo.credit import compared
from whet.algo.policy import PolicyConfig, PolicyGradient
from whet.algo.surrogates import LossConfig
from whet.core.advantages import scaled_by_nonzero
from whet.core.weights import ReducerName, ScaledReducerName


class GPGConfig(PolicyConfig):
    """GPG's settings; nothing is clipped, so clip_low and clip_high are refused."""

    reducer: ReducerName | ScaledReducerName = "token_mean"
    """token_mean: every token counts the same."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="reinforce"))
    """The policy loss."""


def gpg(config: GPGConfig, plan: StepPlan) -> PolicyGradient:
    """Group policy gradient."""
    return PolicyGradient("gpg", config, plan, lambda batch: compared(batch, scaled_by_nonzero(batch)), compares=True)
