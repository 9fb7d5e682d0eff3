"""Layout of samples as rows of tokens for the model, and the way from a row back to its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, as_list, own_routes, stretches
from whet.core.logprobs import Nucleus
from whet.model.attention import Attend, PackedRow
from whet.model.forest import Segment, forest_row, spans_of
from whet.train.flops import pairs_of
from whet.train.torch_native.config import RowsSetting
from whet.train.torch_native.context_row import Context, GatheredRow, RowPart, UlyssesRow
from whet.train.torch_native.forest import forest_of, pack_forests, sort_sequences
from whet.train.torch_native.packing import pack, pack_units

RowKind = Literal["forest", "chains"]

WORTH_SHARING = 0.2
"""Share of the tokens that forests have to save for `auto` to pick them. Their attention takes more calls than that of chains: on a CPU, in
the quickstart's small model, as long as about a sixth of the tokens does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which samples share a row, and of what kind the rows are."""

    rows: list[list[int]]
    """Sample indices of each micro-batch. Samples without a trained token are in none."""
    kind: RowKind


@dataclass(frozen=True, slots=True)
class RowTurn:
    """One row of a rank."""

    samples: list[int]
    counts: bool = True
    """As in `MicroBatch`."""


@dataclass(frozen=True, slots=True)
class RowInput:
    """The model's input for a micro-batch."""

    tokens: Tensor
    """[U] int64"""
    positions: Tensor
    """[U] int64"""
    attend: Attend
    place: Tensor
    """Index in the row of each token of the micro-batch. [T] int64"""
    num_tokens: int
    """Tokens of the row, U, without the padding for the ranks that share it."""
    num_pairs: int
    """Pairs of a token of the row and one that it sees."""
    part: RowPart | None = None
    """Part of the row that `tokens` and `positions` hold, and this rank computes. None: all of it."""
    routes: Tensor | None = None
    """Experts that the tokens go to, as in `TrainBatch.routes`. None: the routers choose. [U, L, K]"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together."""

    samples: list[int]
    """Indices of the samples in the batch."""
    part: TrainBatch
    """Their part of the batch, on the model's device. T tokens."""
    row: RowInput
    lines: Lines | None
    """Tokens that are projected to the vocabulary. None: no token is."""
    counts: bool = True
    """False: it is computed for the exchange with ranks that have more to do, and nothing that it gives counts."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Projections to the vocabulary, one for all trained tokens that samples share at one temperature.

    If nuclei were recorded, each trained token has its own line: samples that share it may have drawn
    it from different tokens.
    """

    predictors: Tensor
    """The token of the row that each line comes from. [L] int64"""
    targets: Tensor
    """The token that it predicts. [L] int64"""
    temperature: Tensor
    """[L] float32"""
    trained: Tensor
    """Which tokens of the micro-batch train. [K] int64"""
    line: Tensor
    """The line of each of them. [K] int64"""
    num_tokens: int
    nucleus: Nucleus | None = None
    """Nucleus that each target was drawn from."""

    def __len__(self) -> int:
        return len(self.targets)

    def spread(self, values: Tensor) -> Tensor:
        """Values of the lines, [L], at every trained token of the micro-batch; 0 elsewhere. [T]"""
        return values.new_zeros(self.num_tokens).index_copy(0, self.trained, values.index_select(0, self.line))


def micro_batches(
    batch: TrainBatch, turns: Iterable[RowTurn], lay: Callable[[TrainBatch], RowInput], device: torch.device, *, projects: bool
) -> Iterator[MicroBatch]:
    """A rank's rows of a batch.

    Args:
        batch: on the CPU.
        turns: rows of the rank.
        lay: makes a row of samples.
        device: device of the model.
        projects: True if hidden states are projected to the vocabulary.
    """
    for turn in turns:
        part = batch.select(turn.samples)
        if not turn.counts and part.weights is not None:
            part = part.with_(weights=torch.zeros_like(part.weights))
        row, there = lay(part), part.with_(routes=None).to(device)
        lines = lines_of(there, row.place, shared=row.num_tokens < part.num_tokens) if projects else None
        yield MicroBatch(turn.samples, there, row, lines, turn.counts)


def plan_rows(batch: TrainBatch, rows: RowsSetting, max_tokens: int) -> Plan:
    """Rows under a budget of tokens that go through the model. A sample over it sits alone, or with its unit."""
    if batch.unit is not None:
        return _plan_units(batch, rows, max_tokens)
    lengths: list[int] = as_list(batch.lengths)
    wanted = [i for i, mask in enumerate(batch.loss_mask.split(lengths)) if bool(mask.any())]
    total = sum(lengths[i] for i in wanted)
    if rows != "chains" and wanted:
        sequences = identities(batch).split(lengths)
        packed, num_tokens = pack_forests([sequences[i] for i in wanted], max_tokens)
        if rows == "forest" or num_tokens <= (1 - WORTH_SHARING) * total:
            return Plan([[wanted[i] for i in row] for row in packed], "forest")
    return Plan([[wanted[i] for i in row] for row in pack([lengths[i] for i in wanted], max_tokens)], "chains")


def _plan_units(batch: TrainBatch, rows: RowsSetting, max_tokens: int) -> Plan:
    """`plan_rows` where some samples must not be parted: what a unit's samples share counts once, what units share is a gift."""
    sequences = identities(batch).split(as_list(batch.lengths))
    units = units_that_train(batch)
    whole = [sum(len(sequences[i]) for i in unit) for unit in units]
    if rows != "chains" and units:
        sizes = [_num_distinct([sequences[i] for i in unit]) for unit in units]
        if rows == "forest" or sum(sizes) <= (1 - WORTH_SHARING) * sum(whole):
            return Plan(pack_units(units, sizes, max_tokens), "forest")
    return Plan(pack_units(units, whole, max_tokens), "chains")


def units_that_train(batch: TrainBatch) -> list[list[int]]:
    """The samples of each unit in which a token trains, in the batch's order."""
    assert batch.unit is not None, "samples without units are packed one by one"
    trains = torch.zeros(batch.num_samples, dtype=torch.bool).index_fill_(0, batch.sample_of_token[batch.loss_mask], True)
    members: dict[int, list[int]] = {}
    for i, unit in enumerate(as_list(batch.unit)):
        members.setdefault(unit, []).append(i)
    return [samples for samples in members.values() if bool(trains[samples].any())]


def _num_distinct(sequences: Sequence[Tensor]) -> int:
    """Distinct prefixes of some sequences."""
    lengths = [len(sequence) for sequence in sequences]
    return sort_sequences(sequences).num_tokens(0, len(sequences), lengths)


def identities(batch: TrainBatch) -> Tensor:
    """Numbers that are equal for tokens which samples may share: of one id, and of the same experts where these are replayed. [T] int64"""
    if batch.routes is None:
        return batch.tokens
    own = own_routes(batch).flatten(1).contiguous()
    width = own.shape[1] * own.element_size()
    data, tokens = own.numpy().tobytes(), as_list(batch.tokens)
    numbers: dict[tuple[int, bytes], int] = {}
    keys = ((token, data[i * width : (i + 1) * width]) for i, token in enumerate(tokens))
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def lay_out(part: TrainBatch, kind: RowKind, device: torch.device, dtype: torch.dtype, context: Context | None = None) -> RowInput:
    """The row of a micro-batch, which is on the CPU; of one that ranks share, this rank's part."""
    lengths: list[int] = as_list(part.lengths)
    forest = forest_of(identities(part).split(lengths)) if kind == "forest" else None
    place = torch.arange(part.num_tokens) if forest is None else forest.place
    tokens = part.tokens if forest is None else part.tokens.new_empty(len(forest.tokens)).index_copy_(0, place, part.tokens)
    filling = -len(tokens) % context.multiple if context is not None else 0
    if forest is not None:
        num_pairs = sum(pairs_of(span.end - span.start, span.depth) for span in spans_of(forest.segments))
        attend = forest_row([*forest.segments, *([Segment(filling, -1)] if filling else [])], device, dtype)
    else:
        num_pairs = sum(pairs_of(length) for length in lengths)
        attend = PackedRow([*lengths, filling] if filling else lengths, device)
    routes = None if part.routes is None else _row_routes(part, place, len(tokens) + filling)
    if context is None:
        there = None if routes is None else routes.to(device)
        return RowInput(tokens.to(device), attend.positions, attend, place.to(device), len(tokens), num_pairs, routes=there)
    filled = torch.cat([tokens, tokens.new_zeros(filling)])
    places = context.places(len(filled), context.rank)
    own = RowPart(places.to(device), len(filled), context.group)
    if context.attention == "ulysses":
        shared: Attend = UlyssesRow(attend, context)
    else:
        assert kind == "chains", "queries alone attend in chains"
        shared = GatheredRow([*lengths, filling] if filling else lengths, context, device)
    there = None if routes is None else routes[places].to(device)
    return RowInput(filled[places].to(device), attend.positions[own.places], shared, place.to(device), len(tokens), num_pairs, own, there)


def _row_routes(part: TrainBatch, place: Tensor, num_tokens: int) -> Tensor:
    """Experts of the tokens of a row, padding included. Tokens that samples share have the same. [num_tokens, L, K]"""
    own = own_routes(part)
    return own.new_zeros(num_tokens, *own.shape[1:]).index_copy_(0, place, own)


def lines_of(part: TrainBatch, place: Tensor, *, shared: bool = True) -> Lines:
    """The lines of a micro-batch whose tokens are at `place` in their row; `shared`: where samples may share tokens."""
    trained = part.loss_mask.nonzero().squeeze(-1)
    if part.nucleus_sizes is not None and part.nucleus_ids is not None:
        ids = part.nucleus_ids[stretches(part.nucleus_sizes, trained)].long()
        offsets = torch.cat([trained.new_zeros(1), part.nucleus_sizes[trained].cumsum(0)]).cpu()
        heat, line = part.temperature[part.sample_of_token[trained]], torch.arange(len(trained), device=trained.device)
        return Lines(place[trained - 1], part.tokens[trained], heat, trained, line, part.num_tokens, Nucleus(ids, offsets))
    if not shared:
        heat, line = part.temperature[part.sample_of_token[trained]], torch.arange(len(trained), device=trained.device)
        return Lines(place[trained - 1], part.tokens[trained], heat, trained, line, part.num_tokens)
    heats, heat = part.temperature[part.sample_of_token[trained]].unique(return_inverse=True)
    lines, line = (place[trained] * len(heats) + heat).unique(return_inverse=True)
    one = torch.zeros_like(lines).scatter_(0, line, torch.arange(len(line), device=line.device))  # any of a line's: they are alike
    chosen = trained[one]
    return Lines(place[chosen - 1], part.tokens[chosen], heats[heat[one]], trained, line, part.num_tokens)
