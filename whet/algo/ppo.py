"""PPO: advantages from a critic by generalized advantage estimation, and the clipped surrogate. arXiv 1707.06347, 1506.02438."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whet.algo.base import LossTerms, Need, StepPlan
from whet.algo.config import PPOConfig
from whet.algo.credit import Assign, Credit
from whet.algo.policy import PolicyGradient
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.losses import value_loss
from whet.core.preference import last_tokens
from whet.core.returns import gae, rewards_on_tokens, td_errors, time_steps
from whet.observe.metrics import Mean


class PPO(PolicyGradient):
    """The actor's side is a policy gradient; the critic fills `values` before credit and learns `returns`."""

    def __init__(self, config: PPOConfig, plan: StepPlan, assign: Assign) -> None:
        super().__init__("ppo", config, plan, assign, needs=frozenset({Need.VALUES}))
        self._value_config = config

    def value_loss(self, batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        """`value_terms` of what the critic says now."""
        assert out.values is not None, "a scalar head gives values"
        return value_terms(batch, out.values, self._value_config)


def ppo(config: PPOConfig, plan: StepPlan) -> PPO:
    """PPO with its settings."""

    def assign(batch: TrainBatch) -> Credit:
        rewards = rewards_on_tokens(batch, config.reward_at)
        steps = time_steps(batch, config.credit_over)
        beyond = values_beyond(batch) if config.bootstrap_truncated else None
        errors = td_errors(batch, rewards, steps, gamma=config.gamma, beyond=beyond)
        advantages, returns = gae(batch, rewards, steps, gamma=config.gamma, lam=config.lam, errors=errors)
        return Credit(advantages, returns, batch.valid, errors.masked_fill(~steps, math.nan))

    return PPO(config, plan, assign)


def values_beyond(batch: TrainBatch) -> Tensor | None:
    """The critic's estimate after each sample's last token if its trajectory was cut; 0 if the
    trajectory ended by itself. [N]

    Raises:
        ValueError: if the critic's scores are missing.
    """
    if batch.truncated is None:
        return None
    if batch.scores is None:
        raise ValueError("a truncated trajectory goes on with the critic's score of its last token, and this batch has no scores")
    return batch.scores[last_tokens(batch)] * batch.truncated


def value_terms(batch: TrainBatch, predicted: Tensor, config: PPOConfig) -> LossTerms:
    """The critic's loss: half the squared error to the returns, with the prediction's move clipped.

    Args:
        batch: with `values` (that the returns were made with) and `returns`.
        predicted: the critic's present values, with gradient. [T]
        config: for the clip.
    """
    assert batch.values is not None and batch.returns is not None, "values and returns come with the credit"
    found = value_loss(predicted, batch.values, batch.returns, config.value_clip)
    mask, count = batch.loss_mask, batch.loss_mask.sum()

    def mean(column: Tensor) -> Mean:
        return Mean(torch.where(mask, column.detach(), torch.zeros_like(column)).sum(), count)

    metrics = {
        "critic/error": mean((predicted - batch.returns).square()),
        "critic/clip_fraction": mean(found.clipped.to(torch.float32)),
        "critic/value": mean(predicted),
        "critic/return": mean(batch.returns),
    }
    return LossTerms(0.5 * found.terms, {**metrics})
