"""GRPO for pass@k: only the best trajectory of a group is rewarded, by its lead over the second best. arXiv 2503.19595."""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import GRPOPassKConfig
from whet.algo.credit import Credit, compared
from whet.algo.policy import PolicyGradient
from whet.core.advantages import best_of_group
from whet.core.batch import TrainBatch


def grpo_passk(config: GRPOPassKConfig, plan: StepPlan) -> PolicyGradient:
    """GRPO with the best-of-group advantage."""

    def assign(batch: TrainBatch) -> Credit:
        return compared(batch, best_of_group(batch, normalize_std=config.normalize_std))

    return PolicyGradient("grpo_passk", config, plan, assign, compares=True)
