"""An algorithm and a loss of one's own, with numbers that no formula on the page gives."""

from __future__ import annotations

from whet.algo.config import GRPOConfig
from whet.algo.credit import compared
from whet.algo.policy import PolicyGradient
from whet.core.losses import ClipTerms


def halves(options, plan):
    """Half of the reward is the advantage."""
    return PolicyGradient("halves", GRPOConfig(), plan, lambda batch: compared(batch, 0.5 * batch.rewards), compares=True)


def squares(batch, logprobs, old_logprobs, options):
    """The squared log-ratio."""
    terms = (logprobs - old_logprobs).square() - batch.advantages * logprobs
    return ClipTerms(terms, (logprobs - old_logprobs).exp().detach(), batch.loss_mask & False, batch.loss_mask & False)
