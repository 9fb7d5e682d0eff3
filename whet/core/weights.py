"""Reducers as weights: a loss is `sum(weights * terms)`, and the denominator is global to the optimizer step.

Weights are computed once, on the whole step, before anything is cut into micro-batches, rows or ranks, so no cut
changes a gradient. A caller that holds only a part of the step passes what the step counts as `total`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, one_per_trajectory
from whet.core.choices import ReducerName, ScaledReducerName
from whet.core.segments import per_sample_count

Reducer = Callable[[TrainBatch], Tensor]


def token_mean(batch: TrainBatch, total: float | None = None) -> Tensor:
    """Every trained token counts the same: w = mask / (trained tokens of the step). [T] float32

    DAPO (arXiv 2503.14476), eq. 8. slime's calculate_per_token_loss (which counts a sample without trained tokens as one
    token), verl's token-mean.
    """
    count = batch.loss_mask.sum().clamp(min=1) if total is None else total
    return batch.loss_mask.to(torch.float32) / count


def sample_mean(batch: TrainBatch, total: float | None = None) -> Tensor:
    """Every trajectory counts the same: w = mask / its trained tokens / valid trajectories of the step. [T] float32

    The samples of one trajectory count once, together. A valid trajectory whose tokens are all masked still counts in
    the denominator, so masking one never makes the others louder. GRPO (arXiv 2402.03300), eq. 3. slime's default.
    """
    owner = batch.trajectory[batch.sample_of_token]
    trained = torch.bincount(owner[batch.loss_mask], minlength=int(batch.trajectory.max()) + 1)
    return batch.loss_mask.to(torch.float32) / (trained.clamp(min=1)[owner] * _trajectories(batch, total))


def group_mean(batch: TrainBatch, total: float | None = None) -> Tensor:
    """Every group counts the same: w = mask / its trained tokens / groups with a valid trajectory. [T] float32"""
    owner = batch.group[batch.sample_of_token]
    trained = torch.bincount(owner[batch.loss_mask], minlength=int(batch.group.max()) + 1)
    used = torch.bincount(batch.group[batch.valid]) > 0
    count = max(int(used.sum()), 1) if total is None else total
    return batch.loss_mask.to(torch.float32) / (trained.clamp(min=1)[owner] * count)


def token_sum_mean(batch: TrainBatch, total: float | None = None) -> Tensor:
    """A sum over tokens, a mean over trajectories: w = mask / valid trajectories of the step. [T] float32"""
    return batch.loss_mask.to(torch.float32) / _trajectories(batch, total)


def sequence_mean(batch: TrainBatch, total: float | None = None) -> Tensor:
    """Every sample with a trained token counts the same: w = mask / its trained tokens / such samples. [T] float32

    verl's seq-mean-token-mean: a sequence without a trained token is left out, and one trajectory's samples count each.
    """
    count = per_sample_count(batch)
    return batch.loss_mask.to(torch.float32) / (count.clamp(min=1)[batch.sample_of_token] * _sequences(count, total))


def sequence_sum(batch: TrainBatch, total: float | None = None) -> Tensor:
    """A sum over tokens, a mean over samples with a trained token: w = mask / such samples. [T] float32

    verl's seq-mean-token-sum.
    """
    return batch.loss_mask.to(torch.float32) / _sequences(per_sample_count(batch), total)


def constant(batch: TrainBatch, scale: float) -> Tensor:
    """A sum over all tokens, over a constant: w = mask / scale. [T] float32

    verl's seq-mean-token-sum-norm, with scale the padded width or a limit.
    """
    return batch.loss_mask.to(torch.float32) / scale


def constant_length(batch: TrainBatch, scale: float, total: float | None = None) -> Tensor:
    """`token_sum_mean` over a constant: w = mask / scale / valid trajectories of the step. [T] float32

    As `sample_mean` would be if all trajectories had `scale` trained tokens, so no length enters. Dr.GRPO (arXiv
    2503.20783), with scale the token limit.
    """
    return token_sum_mean(batch, total) / scale


def build_reducer(name: ReducerName | ScaledReducerName, scale: float | None = None) -> Reducer:
    """A reducer by its name.

    Raises:
        ValueError: if the reducer needs a scale and has none, or takes no scale and got one.
    """
    if name == "constant" or name == "constant_length":
        if scale is None:
            raise ValueError(f"the reducer {name} divides by a number: set reducer_scale, to the token limit for example")
        return partial(constant if name == "constant" else constant_length, scale=scale)
    if scale is not None:
        raise ValueError(f"the reducer {name} takes no scale, but reducer_scale is {scale}; leave it out")
    return REDUCERS[name]


def _trajectories(batch: TrainBatch, total: float | None) -> float:
    return max(len(one_per_trajectory(batch)), 1) if total is None else total


def _sequences(count: Tensor, total: float | None) -> float:
    return max(int((count > 0).sum()), 1) if total is None else total


REDUCERS: dict[ReducerName, Reducer] = {
    "token_mean": token_mean,
    "sample_mean": sample_mean,
    "group_mean": group_mean,
    "token_sum_mean": token_sum_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
}
