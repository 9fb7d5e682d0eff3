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
    """The columns of `TokenTerms`, as rows of a table."""

    def __init__(self) -> None:
        self._missing = {"ranks", *DETAIL}

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

    def tokens(self, table: Tensor, mask: Tensor) -> TokenTerms:
        """The columns of a step.

        Args:
            table: what `rows_of` gave of its micro-batches, put together. Changed in place. [K, T]
            mask: the tokens that train. [T] bool
        """
        table.masked_fill_(~mask, math.nan)
        for row, name in enumerate(NAMES):
            if name in self._missing:
                table[row] = math.nan
        return TokenTerms(*table.unbind())
