"""REINFORCE++: discounted returns per token, whitened over the rollout, without groups and without a critic. arXiv 2501.03262."""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import ReinforcePlusPlusConfig
from whet.algo.credit import Credit, of_tokens
from whet.algo.policy import PolicyGradient
from whet.core.batch import TrainBatch
from whet.core.returns import discounted_returns, rewards_on_tokens, time_steps, turn_returns


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
