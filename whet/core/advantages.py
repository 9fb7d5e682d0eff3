"""Advantages from comparing the trajectories of a group: one number per sample. Each estimator sees whole groups.

The statistics are over a group's valid trajectories, and a trajectory counts once however many samples it left. Samples of
a failed trajectory get 0. A trajectory's score is its reward plus its token rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, one_per_trajectory
from whet.core.returns import scores

Singleton = Literal["zero", "raw", "refuse"]
"""Treatment of a group with one valid trajectory. zero: advantage 0, since there is nothing to compare
with; raw: its own score (verl); refuse: a ValueError."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The valid trajectories, and what each group of them has."""

    members: Tensor
    """The first sample of each valid trajectory. [M] int64"""
    group: Tensor
    """Group of each trajectory. [M] int64"""
    score: Tensor
    """[M] float64"""
    count: Tensor
    """Valid trajectories of each group. [G] float64"""

    def total(self, values: Tensor) -> Tensor:
        """Sum over each group's members. [G]"""
        return torch.zeros_like(self.count).index_add_(0, self.group, values)

    @property
    def mean(self) -> Tensor:
        """Exactly a group's score where all of its scores are equal. [G]"""
        lowest = torch.full_like(self.count, math.inf).scatter_reduce_(0, self.group, self.score, "amin")
        lowest = torch.where(self.count > 0, lowest, 0.0)
        return lowest + self.total(self.score - lowest[self.group]) / self.count.clamp(min=1)

    @property
    def std(self) -> Tensor:
        """With one less than the group's size in its denominator; 0 for a group of one. [G]"""
        squares = self.total((self.score - self.mean[self.group]).square())
        return (squares / (self.count - 1).clamp(min=1)).sqrt()


def groups_of(batch: TrainBatch) -> Groups:
    """The batch's valid trajectories by group."""
    members = one_per_trajectory(batch)
    group = batch.group[members]
    count = torch.bincount(group, minlength=int(batch.group.max()) + 1)
    return Groups(members, group, scores(batch)[members], count.to(batch.rewards.dtype))


def group_sizes(batch: TrainBatch) -> Tensor:
    """Number of valid trajectories in each group. [G] int64"""
    members = one_per_trajectory(batch)
    return torch.bincount(batch.group[members], minlength=int(batch.group.max()) + 1)


def group_advantages(
    batch: TrainBatch,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    std_floor: float = 0.0,
    singleton: Singleton = "zero",
) -> Tensor:
    """GRPO: (score - group mean) / (group std + eps). [N] float64

    The std has one less than the group's size in its denominator. Source: arXiv 2402.03300, section 4.1.2; without the
    division by the std: Dr.GRPO, arXiv 2503.20783. verl's `grpo` is singleton="raw"; its `grpo_vectorized` floors the std
    at 1e-3 besides; slime's is the default.

    Args:
        batch: whole groups.
        normalize_std: divide by the group's std.
        eps: added to the std.
        std_floor: smallest std.
        singleton: treatment of a group with one valid trajectory.
    """
    groups = groups_of(batch)
    advantages = scores(batch) - groups.mean[batch.group]
    if normalize_std:
        advantages = advantages / (groups.std.clamp(min=std_floor)[batch.group] + eps)
    return _settle(batch, groups, advantages, singleton)


def leave_one_out(batch: TrainBatch, *, singleton: Singleton = "zero") -> Tensor:
    """RLOO: score - mean of the other trajectories' scores = n / (n - 1) (score - mean). [N] float64

    Source: arXiv 2402.14740. verl's `rloo` is singleton="raw", its `rloo_vectorized` the default.
    """
    groups = groups_of(batch)
    count = groups.count[batch.group]
    advantages = (scores(batch) - groups.mean[batch.group]) * count / (count - 1).clamp(min=1)
    return _settle(batch, groups, advantages, singleton)


def best_of_group(
    batch: TrainBatch, *, normalize_std: bool = True, eps: float = 1e-6, singleton: Singleton = "zero"
) -> Tensor:
    """GRPO for pass@k: the best trajectory gets its lead over the second best, the others 0. [N] float64

    Of several best ones none leads. Source: arXiv 2503.19595. verl's `grpo_passk` is singleton="refuse".
    """
    groups = groups_of(batch)
    lead = torch.zeros_like(groups.score)
    for g in range(len(groups.count)):
        places = (groups.group == g).nonzero().squeeze(-1)
        if len(places) >= 2:
            best = groups.score[places].topk(2)
            lead[places[best.indices[0]]] = best.values[0] - best.values[1]
    if normalize_std:
        lead = lead / (groups.std[groups.group] + eps)
    by_trajectory = torch.zeros(int(batch.trajectory.max()) + 1, dtype=lead.dtype, device=lead.device)
    by_trajectory[batch.trajectory[groups.members]] = lead
    return _settle(batch, groups, by_trajectory[batch.trajectory], "zero" if singleton == "raw" else singleton)


def length_weighted(batch: TrainBatch, *, singleton: Singleton = "zero") -> Tensor:
    """OPO: score - (sum of length * score) / (sum of lengths) over the group; lengths are trained tokens. [N] float64

    The baseline of least variance if a trajectory's squared gradient grows with its length. Source: arXiv 2505.23585.
    verl's `opo` is singleton="raw".
    """
    groups = groups_of(batch)
    trained = torch.bincount(batch.trajectory[batch.sample_of_token][batch.loss_mask], minlength=int(batch.trajectory.max()) + 1)
    length = trained[batch.trajectory[groups.members]].to(groups.score.dtype)
    total, mean = groups.total(length), groups.mean
    away = groups.total(length * (groups.score - mean[groups.group])) / torch.where(total > 0, total, torch.ones_like(total))
    baseline = torch.where(total > 0, mean + away, 0.0)
    return _settle(batch, groups, scores(batch) - baseline[batch.group], singleton)


def scaled_by_nonzero(batch: TrainBatch, *, singleton: Singleton = "zero") -> Tensor:
    """GPG: alpha (score - group mean) with alpha = trajectories / trajectories whose score is not 0. [N] float64

    alpha makes up for trajectories that teach nothing. Source: arXiv 2504.02546. verl's `gpg` is singleton="raw".
    """
    groups = groups_of(batch)
    alpha = len(groups.score) / max(int((groups.score != 0).sum()), 1)
    return alpha * _settle(batch, groups, scores(batch) - groups.mean[batch.group], singleton)


def mean_normalized(batch: TrainBatch, *, eps: float = 1e-6) -> Tensor:
    """MaxRL: (score - group mean) / group mean, for scores that are not negative. [N] float64

    With scores of 0 and 1 its gradient approaches that of the log-likelihood of success as groups grow. A group that never
    succeeds gets 0. Source: arXiv 2602.02710.

    Raises:
        ValueError: if a score is negative: the mean is no success rate then.
    """
    groups = groups_of(batch)
    if bool((groups.score < 0).any()):
        raise ValueError(
            f"maxrl divides by the group's mean score, so scores must not be negative, but one is {float(groups.score.min())}"
        )
    mean = groups.mean[batch.group]
    advantages = torch.where(mean > eps, (scores(batch) - mean) / mean.clamp(min=eps), torch.zeros_like(mean))
    return _settle(batch, groups, advantages, "zero")


def nothing_to_compare(score: Sequence[float], *, least_std: float = 1e-6) -> str | None:
    """Why a group's scores teach nothing: they differ too little. None if their std (n - 1, in float64) is above `least_std`.

    The reason names the score, so that groups that always fail and groups that always succeed are counted apart.
    """
    if len(score) >= 2 and float(torch.tensor(score, dtype=torch.float64).std()) > least_std:
        return None
    return f"zero_std_{round(score[0], 1)}"


def _settle(batch: TrainBatch, groups: Groups, advantages: Tensor, singleton: Singleton) -> Tensor:
    """0 for failed trajectories, and what `singleton` says for groups of one."""
    alone = groups.count[batch.group] < 2
    if singleton == "refuse" and bool((alone & batch.valid).any()):
        raise ValueError("a group has one valid trajectory, but this estimator compares at least two; sample more per prompt")
    lone = scores(batch) if singleton == "raw" else torch.zeros_like(advantages)
    return torch.where(batch.valid, torch.where(alone, lone, advantages), torch.zeros_like(advantages))
