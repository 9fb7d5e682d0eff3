"""Rewards on tokens, and what they add up to: discounted returns and generalized advantage estimation.

Time steps are tokens. Which tokens are steps is an argument: a token that is none carries the value, the return and the
advantage of what follows it, unchanged and undiscounted. Credit flows through a trajectory's samples in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.choices import CreditOver, RewardAt
from whet.core.segments import chains_of, reverse_scan
from whet.types import Origin


def time_steps(batch: TrainBatch, over: CreditOver) -> Tensor:
    """Which tokens are time steps. [T] bool

    `all` takes every token that no prompt brought; in a sample whose history was rewritten, from its first trained token on.
    """
    if over == "actions":
        return batch.loss_mask
    written = batch.origin != int(Origin.PROMPT)
    owner = batch.sample_of_token
    seen = batch.loss_mask.to(torch.int64).cumsum(0)
    before = torch.cat([seen.new_zeros(1), seen])[batch.starts]
    return written & ((batch.order[owner] == 0) | (seen > before[owner]))


def scores(batch: TrainBatch) -> Tensor:
    """Each sample's trajectory reward and all of the trajectory's token rewards, added up. [N] float64"""
    if batch.token_rewards is None:
        return batch.rewards
    owner = batch.trajectory[batch.sample_of_token]
    totals = torch.zeros(int(batch.trajectory.max()) + 1, dtype=batch.rewards.dtype, device=batch.rewards.device)
    return batch.rewards + totals.index_add_(0, owner, batch.token_rewards.to(totals.dtype))[batch.trajectory]


def rewards_on_tokens(batch: TrainBatch, at: RewardAt = "last_action") -> Tensor:
    """The trajectory's reward on one of its tokens, and the token rewards on theirs. [T] float64

    Args:
        batch: the samples.
        at: last_action: the last trained token of the trajectory; last_token: its last token, from any origin (slime's
            choice for PPO). Only a time step can be paid for: of those over `all`, it is the last. A trajectory without one
            gets none.
    """
    chains = chains_of(batch)
    out = torch.zeros(batch.num_tokens, dtype=batch.rewards.dtype, device=batch.rewards.device)
    ends = chains.starts + chains.lengths - 1
    paid = (batch.loss_mask if at == "last_action" else time_steps(batch, "all"))[chains.index]
    places = torch.arange(batch.num_tokens, device=paid.device)
    latest = places.masked_fill(~paid, -1).cummax(0).values[ends]
    tokens = chains.index[latest[latest >= chains.starts]]
    out[tokens] = batch.rewards[batch.sample_of_token[tokens]]
    return out if batch.token_rewards is None else out + batch.token_rewards.to(out.dtype)


def discounted_returns(batch: TrainBatch, rewards: Tensor, steps: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the time steps. [T] float64

    A token that is no step has the return of the next one; its own reward counts nowhere.
    """
    step = steps.to(rewards.dtype)
    return _scan(batch, step * rewards, step * gamma + (1 - step))


def turn_returns(batch: TrainBatch, rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma G_{t+1} where token t + 1 trains, else r_t: every turn is credited by itself. [T] float64

    verl's REINFORCE++. In a conversation with tools the earlier turns never see the reward at its end.
    """
    chains = chains_of(batch)
    after = batch.loss_mask[chains.index].roll(-1).to(rewards.dtype)
    return _scan(batch, rewards, chains.put_back(gamma * after))


def gae(
    batch: TrainBatch,
    rewards: Tensor,
    steps: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    beyond: Tensor | None = None,
    errors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the time steps: advantages and returns, neither whitened. [T], [T] float64

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next step of the
    trajectory; after the last one A = 0 and V is `beyond`. A token that is no step has the next one's advantage. Returns
    are A + V.
    Source: arXiv 1506.02438, eq. 16.

    Args:
        batch: with `values`.
        rewards: rewards of each token; those of tokens that are no step count nowhere. [T]
        steps: which tokens are time steps. [T] bool
        gamma: discount.
        lam: 0: one-step bootstrap; 1: the whole return.
        beyond: the value of what would have followed each sample's last token; of a trajectory, that of its last sample
            counts. None: 0, nothing follows. [N]
        errors: the `td_errors` of the same arguments, where they are known. [T]
    """
    if errors is None:
        errors = td_errors(batch, rewards, steps, gamma=gamma, beyond=beyond)
    assert batch.values is not None, "TD errors are of values"
    step = steps.to(errors.dtype)
    advantages = _scan(batch, step * errors, step * gamma * lam + (1 - step))
    return advantages, advantages + batch.values.double()


def td_errors(batch: TrainBatch, rewards: Tensor, steps: Tensor, *, gamma: float = 1.0, beyond: Tensor | None = None) -> Tensor:
    """delta_t = r_t + gamma V_{t+1} - V_t, where t + 1 is the next time step; without a meaning where no step is. [T] float64

    Arguments as for `gae`.
    """
    if batch.values is None:
        raise ValueError("generalized advantage estimation needs the critic's values, and this batch has none")
    values, rewards = batch.values.double(), rewards.double()
    step = steps.to(values.dtype)
    chains = chains_of(batch)
    ends = chains.starts + chains.lengths - 1
    last = chains.index[ends]
    end = torch.zeros_like(values[last]) if beyond is None else beyond.double()[batch.sample_of_token[last]]
    following = (step * values).index_add(0, last, (1 - step[last]) * end)
    ahead = _scan(batch, following, 1 - step)[chains.index].roll(-1).index_copy(0, ends, end)
    return rewards + gamma * chains.put_back(ahead) - values


def _scan(batch: TrainBatch, terms: Tensor, decay: Tensor) -> Tensor:
    """`reverse_scan` along each trajectory, of columns in batch order."""
    chains = chains_of(batch)
    return chains.put_back(reverse_scan(terms[chains.index], decay[chains.index], chains.lengths))
