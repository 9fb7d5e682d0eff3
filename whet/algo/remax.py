"""ReMax: the baseline of a trajectory is the reward of a greedy reply to the same prompt. arXiv 2310.10505."""

from __future__ import annotations

from whet.algo.base import Need, StepPlan
from whet.algo.config import ReMaxConfig
from whet.algo.credit import Credit, of_tokens
from whet.algo.policy import PolicyGradient
from whet.core.batch import TrainBatch
from whet.core.returns import discounted_returns, rewards_on_tokens


def remax(config: ReMaxConfig, plan: StepPlan) -> PolicyGradient:
    """Reward to go, less the greedy reply's reward."""
    return PolicyGradient("remax", config, plan, _assign, needs=frozenset({Need.BASELINE}))


def _assign(batch: TrainBatch) -> Credit:
    if batch.baseline is None:
        raise ValueError("remax compares each reply with a greedy one, but the rollout brought no baseline rewards")
    returns = discounted_returns(batch, rewards_on_tokens(batch), batch.loss_mask)
    return of_tokens(batch, returns - batch.baseline[batch.sample_of_token], returns)
