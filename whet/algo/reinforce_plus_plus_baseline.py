"""REINFORCE++-baseline: reward less the group's mean, whitened over the rollout instead of divided by each group's std.

Source: arXiv 2501.03262.
"""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.credit import Credit, compared
from whet.algo.policy import PolicyConfig, PolicyGradient
from whet.core.advantages import group_advantages
from whet.core.batch import TrainBatch


class ReinforcePlusPlusBaselineConfig(PolicyConfig):
    """REINFORCE++-baseline's settings."""

    whiten: bool = True
    """Shift and scale advantages to mean 0 and std 1 over the rollout's trained tokens."""


def reinforce_plus_plus_baseline(config: ReinforcePlusPlusBaselineConfig, plan: StepPlan) -> PolicyGradient:
    """Group-mean baseline with rollout-wide whitening."""

    def assign(batch: TrainBatch) -> Credit:
        return compared(batch, group_advantages(batch, normalize_std=False))

    return PolicyGradient("reinforce_plus_plus_baseline", config, plan, assign, compares=True)
