"""Which samples make a micro-batch, and which data-parallel rank computes it: every rank has the same number in each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from whet.train.balance import balanced_parts
from whet.train.torch_native.packing import pack, split_rows

Packing = Literal["tokens", "cost", "count"]
"""tokens: first-fit under a token budget; cost: as many micro-batches as the budget asks for, of about equal cost (one may
exceed the budget); count: a fixed number of samples each."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """Division of a rollout's samples into steps and micro-batches."""

    num_ranks: int
    """Data-parallel ranks."""
    trajectories_per_step: int
    packing: Packing = "tokens"
    max_tokens: int = 0
    """Token budget of a micro-batch: that of a device, times the ranks that share a sequence."""
    samples_per_micro_batch: int = 1
    """For the packing by count."""
    balance_ranks: bool = False
    """Give ranks micro-batches of about equal cost, rather than in turn."""
    multiple: int = 1
    """Divisor of each rank's number of micro-batches (a pipeline's interleaving)."""


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """One optimizer step."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Sample indices of each micro-batch of each rank. [rank][micro-batch][sample]"""
    num_trajectories: int


def schedule_steps(
    lengths: Sequence[int], trajectory: Sequence[int], plan: SchedulePlan, cost: Callable[[int], float]
) -> list[StepSchedule]:
    """Cut a rollout into optimizer steps and these into micro-batches for each rank.

    The samples of one trajectory stay in one step. Trajectories that do not fill a step are left out.

    Args:
        lengths: tokens of each sample.
        trajectory: trajectory of each sample.
        plan: division into steps.
        cost: cost of a sequence of that many tokens, in any unit.

    Raises:
        ValueError: if no step can be filled, or a step cannot be cut so that every rank has the same number of micro-batches.
    """
    members: dict[int, list[int]] = {}
    for i, name in enumerate(trajectory):
        members.setdefault(name, []).append(i)
    names = list(members)
    num_steps = len(names) // plan.trajectories_per_step
    if num_steps == 0:
        raise ValueError(f"{len(names)} trajectories do not fill a step of {plan.trajectories_per_step}")
    steps: list[StepSchedule] = []
    for step in range(num_steps):
        chosen = names[step * plan.trajectories_per_step : (step + 1) * plan.trajectories_per_step]
        samples = [i for name in chosen for i in members[name]]
        rows = _micro_batches([lengths[i] for i in samples], plan, cost)
        costs = [sum(cost(lengths[samples[j]]) for j in row) for row in rows]
        if plan.balance_ranks:
            ranks = balanced_parts(costs, plan.num_ranks, equal_size=True)
        else:
            ranks = [list(range(rank, len(rows), plan.num_ranks)) for rank in range(plan.num_ranks)]
        split = tuple(tuple(tuple(samples[j] for j in rows[k]) for k in rank) for rank in ranks)
        steps.append(StepSchedule(split, len(chosen)))
    return steps


def _micro_batches(lengths: list[int], plan: SchedulePlan, cost: Callable[[int], float]) -> list[list[int]]:
    """Micro-batches of one step, their number a multiple of what the ranks need."""
    multiple = plan.num_ranks * plan.multiple
    if len(lengths) < multiple:
        raise ValueError(f"a step of {len(lengths)} samples leaves some of {multiple} micro-batches empty; take more per step")
    if plan.packing != "count":
        if plan.packing == "cost":
            wanted = min(max(math.ceil(sum(lengths) / plan.max_tokens), 1), len(lengths))
            alone = [[i] for i in range(len(lengths))]
            rows = alone if wanted == len(lengths) else balanced_parts([cost(length) for length in lengths], wanted)
        else:
            rows = pack(lengths, plan.max_tokens)
        return split_rows(rows, lengths, -(-len(rows) // multiple) * multiple)
    size = plan.samples_per_micro_batch
    rows = [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    if len(rows) % multiple:
        raise ValueError(
            f"{len(lengths)} samples in micro-batches of {size} make {len(rows)}, no multiple of {multiple}; change the number per step"
        )
    return rows
