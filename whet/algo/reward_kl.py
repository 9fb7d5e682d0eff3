"""KL(policy || reference) as a part of the reward, with a coefficient that is fixed or follows a target."""

from __future__ import annotations

import torch

from whet.algo.policy_config import RewardKLConfig
from whet.core.batch import TrainBatch, as_list
from whet.core.kl import KL_ESTIMATORS, adapted_kl_coef
from whet.core.segments import per_sample_count, per_sample_mean
from whet.observe.metrics import Last, Mean, Metrics


class RewardKL:
    """The penalty, and its present coefficient: state of the run where it adapts."""

    def __init__(self, config: RewardKLConfig) -> None:
        self.config = config
        self.coef = config.coef

    def penalize(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """The batch with each trained token's reward lowered by coef * KL.

        The coefficient adapts after its use, to the mean over samples of their mean KL, and by the number of trajectories. Those without a
        trained token have no KL: they count in neither.
        """
        config = self.config
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "annotated before credit"
        kl = KL_ESTIMATORS[config.estimator](batch.old_logprobs, batch.ref_logprobs) * batch.loss_mask
        used = per_sample_count(batch) > 0
        mean = Mean(float(per_sample_mean(batch, kl)[used].sum()), int(used.sum()))
        metrics: Metrics = {"reward_kl/kl": mean, "reward_kl/coef": Last(self.coef)}
        given = torch.zeros_like(kl) if batch.token_rewards is None else batch.token_rewards
        part = -self.coef * kl
        penalized = batch.with_(token_rewards=given + part, kl_rewards=part)
        if config.target is not None and mean.value is not None:
            trajectories = len(set(as_list(batch.trajectory[used])))
            self.coef = adapted_kl_coef(self.coef, mean.value, trajectories, target=config.target, horizon=config.horizon)
        return penalized, metrics
