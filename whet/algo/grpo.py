"""GRPO: the advantage of a trajectory is its reward relative to its siblings'. arXiv 2402.03300.

With clip-higher and token-mean: DAPO's loss (arXiv 2503.14476).
"""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import CISPOConfig, DrGRPOConfig, GMPOConfig, GRPOConfig, GSPOConfig, SAPOConfig
from whet.algo.credit import Credit, compared
from whet.algo.policy import PolicyGradient
from whet.core.advantages import group_advantages
from whet.core.batch import TrainBatch

Relative = GRPOConfig | DrGRPOConfig | GSPOConfig | CISPOConfig | SAPOConfig | GMPOConfig
"""Algorithms that share the credit, and differ in the policy loss and the defaults."""


def grpo(config: Relative, plan: StepPlan, name: str | None = None) -> PolicyGradient:
    """Group-relative policy optimisation, with the policy loss of the settings; `name` is for error messages."""

    def assign(batch: TrainBatch) -> Credit:
        return compared(batch, group_advantages(batch, normalize_std=config.normalize_std))

    return PolicyGradient(name or config.name, config, plan, assign, compares=True)
