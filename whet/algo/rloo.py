"""RLOO: the baseline of a trajectory is the mean reward of the others in its group. arXiv 2402.14740."""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import RLOOConfig
from whet.algo.credit import compared
from whet.algo.policy import PolicyGradient
from whet.core.advantages import leave_one_out


def rloo(config: RLOOConfig, plan: StepPlan) -> PolicyGradient:
    """REINFORCE leave-one-out, with the clipped ratio for more than one step per rollout."""
    return PolicyGradient("rloo", config, plan, lambda batch: compared(batch, leave_one_out(batch)), compares=True)
