"""MaxRL: the group's mean in place of its std, which makes success rates of hard prompts rise fastest. arXiv 2602.02710."""

from __future__ import annotations

from pydantic import model_validator

from whet.algo.base import StepPlan
from whet.algo.credit import compared
from whet.algo.policy import PolicyConfig, PolicyGradient
from whet.core.advantages import mean_normalized


class MaxRLConfig(PolicyConfig):
    """MaxRL's settings; rewards must not be negative."""

    @model_validator(mode="after")
    def _keeps_rewards(self) -> MaxRLConfig:
        if self.kl_reward.coef > 0:
            raise ValueError(
                f"kl_reward.coef={self.kl_reward.coef:g} makes rewards negative, which maxrl cannot use; set kl_coef, which is in the "
                "loss, or choose another algorithm"
            )
        return self


def maxrl(config: MaxRLConfig, plan: StepPlan) -> PolicyGradient:
    """Maximum-likelihood reinforcement learning."""
    return PolicyGradient("maxrl", config, plan, lambda batch: compared(batch, mean_normalized(batch)), compares=True)
