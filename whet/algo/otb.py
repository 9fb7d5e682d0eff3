"""The optimal token baseline: each step of a group has the baseline that makes the gradient's variance least."""

from __future__ import annotations

from whet.algo.base import Need, StepPlan
from whet.algo.config import OTBConfig
from whet.algo.credit import Credit, compared
from whet.algo.policy import PolicyGradient
from whet.core.batch import TrainBatch
from whet.core.returns import discounted_returns, rewards_on_tokens
from whet.core.token_baseline import optimal_token_baseline


def otb(config: OTBConfig, plan: StepPlan) -> PolicyGradient:
    """Reward to go, less the group's baseline of that step."""

    def assign(batch: TrainBatch) -> Credit:
        logprobs = batch.old_logprobs if batch.old_logprobs is not None else batch.rollout_logprobs
        if batch.correction is not None and batch.kept is not None:
            batch = batch.with_(correction=batch.correction * batch.kept)
        returns = discounted_returns(batch, rewards_on_tokens(batch), batch.loss_mask)
        baseline = optimal_token_baseline(batch, returns, logprobs, align=config.align, zero_tail=config.zero_tail)
        usable = compared(batch, batch.rewards).usable
        return Credit(returns - baseline, returns, usable)

    needs = frozenset({Need.OLD_LOGPROBS, Need.SQUARED_PROBS})
    return PolicyGradient("otb", config, plan, assign, needs=needs, compares=True)
