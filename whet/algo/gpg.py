"""GPG: the plain policy gradient with the group's mean as baseline, scaled up for groups that teach nothing. arXiv 2504.02546."""

from __future__ import annotations

from whet.algo.base import StepPlan
from whet.algo.config import GPGConfig
from whet.algo.credit import compared
from whet.algo.policy import PolicyGradient
from whet.core.advantages import scaled_by_nonzero


def gpg(config: GPGConfig, plan: StepPlan) -> PolicyGradient:
    """Group policy gradient."""
    return PolicyGradient("gpg", config, plan, lambda batch: compared(batch, scaled_by_nonzero(batch)), compares=True)
