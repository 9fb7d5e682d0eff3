"""The ranks that a backend runs on: distribution of rows over them, and exchange of their results.
Here: one process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from whet.core.batch import TrainBatch
from whet.core.logprobs import WHOLE, Vocabulary
from whet.model.decoder import DecoderModel
from whet.model.tensor_files import save_model
from whet.observe.metrics import Metrics
from whet.train.torch_native.context_row import Context
from whet.train.torch_native.layout import Plan, RowKind, RowTurn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """Result of passes over a batch: of one rank, or of all ranks together."""

    loss: float
    num_tokens: int
    flops: int
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a batch."""

    batch: TrainBatch
    """Samples of the rank's rows. Last come those of rows that do not count."""
    places: Sequence[int]
    """Places in the whole batch of its samples."""
    num_own: int
    """Samples of rows that count, which no other rank has."""
    rows: list[RowTurn]
    """Rows, whose samples are numbered as in `batch`; as many as every other rank's."""
    kind: RowKind


class Ranks(Protocol):
    """Processes that compute in lock-step. Every method that exchanges something is called by all of them."""

    context: Context | None
    """The ranks that share each row. None: no row is shared."""
    vocabulary: Vocabulary
    """Part of the vocabulary that the model's logits are of."""

    writers: ProcessGroup | None
    """Group for agreement while files are written concurrently with computation. None: there is one
    rank."""
    first: bool
    """True if this process writes the files that are written once."""

    @property
    def row_ranks(self) -> int:
        """Ranks that share a row: its budget of tokens is a device's, times this number."""
        ...

    def forward(self, compute: Callable[[], T]) -> T:
        """Call something that runs the model."""
        ...

    def rest(self) -> None:
        """After passes without a backward pass: give back what they had put together."""
        ...

    def share(self, batch: TrainBatch | None, plan: Callable[[TrainBatch], Plan]) -> Share:
        """This rank's part of a batch, which rank 0 has and sends.

        Args:
            batch: on rank 0; others' is not read.
            plan: called there.

        Raises:
            ValueError: what `plan` raised, on every rank.
        """
        ...

    def begin(self, *, last: bool) -> None:
        """Before a micro-batch whose gradients are added up; `last`: whether it is the last one before a step."""
        ...

    def agree(self, fault: str | None) -> str | None:
        """The first rank's fault, if any rank has one."""
        ...

    def gather(self, share: Share, columns: Tensor, batch: TrainBatch | None) -> Tensor:
        """Put the ranks' columns together. On rank 0 they are of the whole batch, 0 where no rank had a row; on others of the share.

        Args:
            share: this rank's.
            columns: of the share's tokens. [K, t, ...], on the CPU
            batch: the whole one, on rank 0.
        """
        ...

    def total(self, number: int) -> int:
        """Sum over the ranks of a number that each has of its own samples."""
        ...

    def add(self, found: Found) -> Found:
        """Results of all ranks together."""
        ...

    def given(self, named: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Weights one after another, each whole and of a dtype, on every rank."""
        ...

    def taken(self, weights: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Weights that another model's `given` yielded, one after another, in the types of this model's
        parameters."""
        ...

    def export(self, model: DecoderModel, folder: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Write a model in Hugging Face format."""
        ...


class OneRank:
    """A process alone."""

    context: Context | None = None
    vocabulary: Vocabulary = WHOLE
    writers: ProcessGroup | None = None
    first = True
    row_ranks = 1

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()

    def rest(self) -> None:
        pass

    def share(self, batch: TrainBatch | None, plan: Callable[[TrainBatch], Plan]) -> Share:
        assert batch is not None, "there is no other rank"
        found = plan(batch)
        return Share(batch, range(batch.num_samples), batch.num_samples, [RowTurn(row) for row in found.rows], found.kind)

    def begin(self, *, last: bool) -> None:
        pass

    def agree(self, fault: str | None) -> str | None:
        return fault

    def gather(self, share: Share, columns: Tensor, batch: TrainBatch | None) -> Tensor:
        return columns

    def total(self, number: int) -> int:
        return number

    def add(self, found: Found) -> Found:
        return found

    def given(self, named: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        return named

    def taken(self, weights: Iterable[tuple[str, Tensor]], own: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return weights

    def export(self, model: DecoderModel, folder: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        save_model(model.hf, folder, {name: tensor.detach().contiguous() for name, tensor in weights})
