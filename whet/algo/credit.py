"""Result of a credit assignment, and its construction from advantages of samples or tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.core.advantages import group_sizes
from whet.core.batch import TrainBatch, one_per_trajectory
from whet.core.returns import scores
from whet.observe.metrics import Mean, Metrics, Total


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages of every token, before distillation, whitening and masking."""

    advantages: Tensor
    """[T]"""
    returns: Tensor
    """Targets of a critic. [T]"""
    usable: Tensor
    """False for samples that teach nothing: their trajectory failed, or has no valid sibling to compare with. [N] bool"""
    td_errors: Tensor | None = None
    """TD errors of the time steps, NaN elsewhere. None: the estimator has none. [T]"""


Assign = Callable[[TrainBatch], Credit]


def compared(batch: TrainBatch, per_sample: Tensor) -> Credit:
    """One advantage per sample, from comparing siblings: groups with fewer than two valid members stop training."""
    advantages = per_sample[batch.sample_of_token]
    return Credit(advantages, advantages, batch.valid & (group_sizes(batch)[batch.group] >= 2))


def of_tokens(batch: TrainBatch, advantages: Tensor, returns: Tensor) -> Credit:
    """One advantage per token, which needs no siblings."""
    return Credit(advantages, returns, batch.valid)


def group_metrics(batch: TrainBatch) -> Metrics:
    """Metrics of the groups: how many there were, and how many taught nothing."""
    sizes = group_sizes(batch)
    members = one_per_trajectory(batch)
    score = scores(batch)[members]
    highest, lowest = torch.full((len(sizes),), -torch.inf, dtype=score.dtype), torch.full((len(sizes),), torch.inf, dtype=score.dtype)
    highest = highest.scatter_reduce(0, batch.group[members], score, "amax")
    lowest = lowest.scatter_reduce(0, batch.group[members], score, "amin")
    return {
        "groups/total": Total(len(sizes)),
        "groups/zero_variance": Mean(int(((sizes >= 2) & (highest == lowest)).sum()), len(sizes)),
        "groups/too_small": Total(int((sizes < 2).sum())),
    }
