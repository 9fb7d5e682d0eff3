"""REINFORCE++-baseline: reward less the group's mean, whitened over the rollout instead of divided by each group's std.

Source: arXiv 2501.03262.
"""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import ReinforcePlusPlusBaselineConfig
from whet.algo.credit import Credit, compared
from whet.algo.policy import PolicyGradient
from whet.core.advantages import group_advantages
from whet.core.batch import TrainBatch


def reinforce_plus_plus_baseline(config: ReinforcePlusPlusBaselineConfig, plan: StepPlan) -> PolicyGradient:
    """Group-mean baseline with rollout-wide whitening."""

    def assign(batch: TrainBatch) -> Credit:
        return compared(batch, group_advantages(batch, normalize_std=False))

    return PolicyGradient("reinforce_plus_plus_baseline", config, plan, assign, compares=True)
