"""Numbers of each token of a step, put together from its micro-batches."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from whet.algo.base import LossTerms
from whet.core.batch import TokenOutputs, TrainBatch
from whet.train.base import TokenTerms

NAMES = tuple(field.name for field in fields(TokenTerms))
DETAIL = ("old_logprobs", "ratio", "clip", "correction")
"""Columns that come with the detail of a loss."""


class TermTable:
    """The columns of `TokenTerms`, as rows of one table that ranks add up.

    Args:
        batch: the step.
    """

    def __init__(self, batch: TrainBatch) -> None:
        self._mask = batch.loss_mask
        self._missing = {"ranks", *DETAIL}
        self.table = torch.zeros(len(NAMES), batch.num_tokens, dtype=torch.float32)
        """0 where this rank computed nothing. [K, T], on the CPU"""

    def rows_of(self, part: TrainBatch, out: TokenOutputs, found: LossTerms) -> Tensor:
        """The columns of a micro-batch. [K, t]"""
        assert part.weights is not None
        detail = None if found.detail is None else found.detail()
        columns: dict[str, Tensor | None] = {"logprobs": out.logprobs, "entropy": out.entropy, "ranks": out.ranks}
        columns["losses"] = part.weights * found.terms
        columns |= {name: None if detail is None else getattr(detail, name) for name in DETAIL}
        self._missing -= {name for name, column in columns.items() if column is not None}
        rows = [columns[name] for name in NAMES]
        nothing = torch.zeros_like(out.logprobs)
        return torch.stack([nothing if row is None else row.detach().to(torch.float32) for row in rows])

    def tokens(self) -> TokenTerms:
        """The columns of the step, once the ranks have added up their tables."""
        self.table.masked_fill_(~self._mask, math.nan)
        for row, name in enumerate(NAMES):
            if name in self._missing:
                self.table[row] = math.nan
        return TokenTerms(*self.table.unbind())
