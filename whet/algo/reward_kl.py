"""KL(policy || reference) as a part of the reward, with a coefficient that is fixed or follows a target."""

from __future__ import annotations

import torch
from pydantic import Field, model_validator

from whet.config import Config, refuse_unread
from whet.core.batch import TrainBatch, as_list
from whet.core.kl import KL_ESTIMATORS, KLName, adapted_kl_coef
from whet.core.segments import per_sample_count, per_sample_mean
from whet.observe.metrics import Last, Mean, Metrics


class RewardKLConfig(Config):
    """KL(policy || reference) as a part of the reward."""

    coef: float = Field(default=0.0, ge=0)
    """Each trained token's reward is lowered by coef times its KL."""
    estimator: KLName = "k1"
    """How KL is estimated from the sampled tokens."""
    target: float | None = Field(default=None, gt=0)
    """Adapt the coefficient so that the KL of a trajectory's mean token stays near this; unset: a fixed coefficient."""
    horizon: int = Field(default=10_000, gt=0)
    """Trajectories over which a deviation of 20% changes the coefficient by 20%."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> RewardKLConfig:
        if self.coef == 0:
            refuse_unread(self, ["target", "horizon"], "with coef=0, from which no coefficient adapts", "set coef above 0")
        if self.target is None:
            refuse_unread(self, ["horizon"], "with a fixed coefficient", "set target")
        return self


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
        penalized = batch.with_(token_rewards=given - self.coef * kl)
        if config.target is not None and mean.value is not None:
            trajectories = len(set(as_list(batch.trajectory[used])))
            self.coef = adapted_kl_coef(self.coef, mean.value, trajectories, target=config.target, horizon=config.horizon)
        return penalized, metrics
