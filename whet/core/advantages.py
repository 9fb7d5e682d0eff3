"""Advantage estimators. Each sees whole groups and knows nothing of layouts or meshes."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, one_per_trajectory


def group_sizes(batch: TrainBatch) -> Tensor:
    """Number of valid trajectories in each group. [G] int64"""
    members = one_per_trajectory(batch)
    return torch.bincount(batch.group[members], minlength=int(batch.group.max()) + 1)


def group_advantages(batch: TrainBatch, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO: (reward - group mean) / (group std + eps), one number per sample. [N] float64

    The std has one less than the group's size in its denominator. Statistics are over the group's valid trajectories;
    samples of a failed trajectory, and of a group with fewer than two valid trajectories, get 0. Source: arXiv
    2402.03300, section 4.1.2; without the division by the std: Dr.GRPO, arXiv 2503.20783.
    """
    members = one_per_trajectory(batch)
    group, reward = batch.group[members], batch.rewards[members]
    count = group_sizes(batch).to(reward.dtype)
    mean = torch.zeros_like(count).index_add_(0, group, reward) / count.clamp(min=1)
    advantages = batch.rewards - mean[batch.group]
    if normalize_std:
        squares = torch.zeros_like(count).index_add_(0, group, (reward - mean[group]).square())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = advantages / (std[batch.group] + eps)
    usable = batch.valid & (count[batch.group] >= 2)
    return torch.where(usable, advantages, torch.zeros_like(advantages))
