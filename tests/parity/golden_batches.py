"""Recorded rows (ragged lists, or padded [B, T] with integer masks) as whet's batches, and whet's columns as such rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, batch_of
from whet.types import Origin, Sample


class Rows:
    """One sample per row, after a prompt of one token. A masked entry is a model's token, the others are the environment's.

    Args:
        masks: which entries train.
        groups: of each row; None: all in one.
        owners: the trajectory of each row; None: each row is one.
        rewards: of each row's trajectory.
    """

    def __init__(
        self,
        masks: Sequence[Sequence[float]],
        *,
        groups: Sequence[Any] | None = None,
        owners: Sequence[Any] | None = None,
        rewards: Sequence[float] | None = None,
    ) -> None:
        self.lengths = [len(mask) for mask in masks]
        owners = list(range(len(masks))) if owners is None else list(owners)
        self.batch: TrainBatch = batch_of(
            [
                Sample(
                    tokens=(0,) * (len(mask) + 1),
                    origin=(Origin.PROMPT, *(Origin.MODEL if m else Origin.ENVIRONMENT for m in mask)),
                    loss_mask=(False, *(bool(m) for m in mask)),
                    logprobs=(0.0,) * (len(mask) + 1),
                    versions=(0,) * (len(mask) + 1),
                    group=str(groups[i]) if groups is not None else "all",
                    trajectory=str(owners[i]),
                    order=owners[:i].count(owners[i]),
                    reward=rewards[i] if rewards is not None else 0.0,
                )
                for i, mask in enumerate(masks)
            ]
        )
        responses = torch.ones(self.batch.num_tokens, dtype=torch.bool)
        responses[self.batch.starts] = False
        self.responses = responses
        """Everything but the prompts. [T] bool"""
        self.index = responses.nonzero().squeeze(-1)

    def column(self, rows: Any) -> Tensor:
        """Rows, or their entries one after the other, as a column. Differentiable in a tensor."""
        flat = rows if isinstance(rows, Tensor) else torch.tensor(flatten(rows), dtype=torch.float32)
        return torch.zeros(self.batch.num_tokens, dtype=flat.dtype).index_copy(0, self.index, flat.reshape(-1))

    def flat(self, column: Tensor) -> Tensor:
        """A column's entries without the prompts. [sum of lengths]"""
        return column[self.index]

    def rows(self, column: Tensor) -> list[list[float]]:
        """A column as rows."""
        return [piece.tolist() for piece in self.flat(column).detach().split(self.lengths)]

    def per_row(self, column: Tensor) -> list[list[float]]:
        """One number per row, for each of its entries."""
        return self.rows(column[self.batch.sample_of_token])


def flatten(rows: Any) -> list[float]:
    """The numbers of nested lists, in order."""
    return [x for row in rows for x in flatten(row)] if isinstance(rows, list | tuple) else [rows]


def leaf(rows: Any) -> Tensor:
    """The numbers of nested lists as something to differentiate by. [sum of lengths]"""
    return torch.tensor(flatten(rows), dtype=torch.float32, requires_grad=True)


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """d value / d leaf, 0 where there is no path."""
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


def by_source(table: Mapping[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """An adapter that goes by the last words of a case's source: the longest key that the source contains."""

    def adapter(case: Mapping[str, Any]) -> Any:
        fitting = [key for key in table if key in case["source"]]
        if not fitting:
            raise LookupError(f"no adapter for {case['source']!r}; there are {', '.join(table)}")
        return table[max(fitting, key=len)](case)

    return adapter
