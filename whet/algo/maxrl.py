"""MaxRL: the group's mean in place of its std, which makes success rates of hard prompts rise fastest. arXiv 2602.02710."""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import MaxRLConfig
from whet.algo.credit import compared
from whet.algo.policy import PolicyGradient
from whet.core.advantages import mean_normalized


def maxrl(config: MaxRLConfig, plan: StepPlan) -> PolicyGradient:
    """Maximum-likelihood reinforcement learning."""
    return PolicyGradient("maxrl", config, plan, lambda batch: compared(batch, mean_normalized(batch)), compares=True)
