"""OPO: the baseline of a group is the mean reward weighted by length, which is that of least variance. arXiv 2505.23585."""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import OPOConfig
from whet.algo.credit import compared
from whet.algo.policy import PolicyGradient
from whet.core.advantages import length_weighted


def opo(config: OPOConfig, plan: StepPlan) -> PolicyGradient:
    """On-policy optimisation with the optimal reward baseline."""
    return PolicyGradient("opo", config, plan, lambda batch: compared(batch, length_weighted(batch)), compares=True)
