"""Reducers as weights: a loss is `sum(weights * terms)`, and the denominator is global to the optimizer step.

Weights are computed once, on the whole step, before anything is cut into micro-batches, rows or ranks, so no cut
changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, one_per_trajectory

ReducerName = Literal["token_mean", "sample_mean"]
Reducer = Callable[[TrainBatch], Tensor]


def token_mean(batch: TrainBatch) -> Tensor:
    """Every trained token counts the same: w = mask / (trained tokens of the step). [T] float32

    DAPO (arXiv 2503.14476), eq. 8.
    """
    return batch.loss_mask.to(torch.float32) / batch.loss_mask.sum().clamp(min=1)


def sample_mean(batch: TrainBatch) -> Tensor:
    """Every trajectory counts the same: w = mask / its trained tokens / valid trajectories of the step. [T] float32

    The samples of one trajectory count once, together. A valid trajectory whose tokens are all masked still counts in
    the denominator, so masking one never makes the others louder. GRPO (arXiv 2402.03300), eq. 3.
    """
    owner = batch.trajectory[batch.sample_of_token]
    trained = torch.bincount(owner[batch.loss_mask], minlength=int(batch.trajectory.max()) + 1)
    num_valid = len(one_per_trajectory(batch))
    return batch.loss_mask.to(torch.float32) / (trained.clamp(min=1)[owner] * max(num_valid, 1))


REDUCERS: dict[ReducerName, Reducer] = {"token_mean": token_mean, "sample_mean": sample_mean}
