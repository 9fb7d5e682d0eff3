"""REINFORCE++: discounted returns per token, whitened over the rollout, without groups and without a critic. arXiv 2501.03262."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.algo.base import StepPlan
from whet.algo.credit import Credit, of_tokens
from whet.algo.policy import PolicyConfig, PolicyGradient
from whet.core.batch import TrainBatch
from whet.core.returns import discounted_returns, rewards_on_tokens, time_steps, turn_returns


class ReinforcePlusPlusConfig(PolicyConfig):
    """REINFORCE++'s settings."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a time step."""
    credit_over: Literal["actions", "all", "turns"] = "actions"
    """actions: trained tokens are the time steps; all: so are the environment's (slime); turns: each turn is credited by
    itself, so only the last one sees the final reward (verl)."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and std 1 over the rollout's trained tokens."""


def reinforce_plus_plus(config: ReinforcePlusPlusConfig, plan: StepPlan) -> PolicyGradient:
    """Reward to go of each token."""

    def assign(batch: TrainBatch) -> Credit:
        rewards = rewards_on_tokens(batch)
        if config.credit_over == "turns":
            returns = turn_returns(batch, rewards, config.gamma)
        else:
            returns = discounted_returns(batch, rewards, time_steps(batch, config.credit_over), config.gamma)
        return of_tokens(batch, returns, returns)

    return PolicyGradient("reinforce_plus_plus", config, plan, assign)
