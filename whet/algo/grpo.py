"""GRPO: the advantage of a trajectory is its reward relative to its siblings'. arXiv 2402.03300.

With clip-higher and token-mean: DAPO's loss (arXiv 2503.14476).
"""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.credit import Credit, compared
from whet.algo.policy import PolicyConfig, PolicyGradient
from whet.core.advantages import group_advantages
from whet.core.batch import TrainBatch


class GRPOConfig(PolicyConfig):
    """GRPO's settings."""

    normalize_std: bool = True
    """Divide the advantage by the group's standard deviation; false is Dr.GRPO's choice."""


def grpo(config: GRPOConfig, plan: StepPlan, name: str = "grpo") -> PolicyGradient:
    """Group-relative policy optimisation, also with another policy loss under its own name."""

    def assign(batch: TrainBatch) -> Credit:
        return compared(batch, group_advantages(batch, normalize_std=config.normalize_std))

    return PolicyGradient(name, config, plan, assign, compares=True)
