"""Per-token columns of a record, from arrays: lists that share the memory of the numbers where these are in the order of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from whet.observe.records.rows import RecordRow
from whet.observe.records.schema import COMPUTED, SAMPLED
from whet.types import UNSAMPLED, Origin, Sample, Trajectory, Turn
from whet.types.columns import Floats

Array = Any
"""A numpy array."""
OTHER = pa.float32()
"""Type of a computed column that `COMPUTED` does not name."""


def check_columns(samples: Sequence[Sample], columns: Mapping[str, Array], taken: Sequence[str]) -> None:
    """Refuse columns that do not fit the samples.

    Raises:
        ValueError: naming the column.
    """
    total = sum(len(sample.tokens) for sample in samples)
    for name, values in columns.items():
        if name in taken and name not in COMPUTED:
            raise ValueError(f"a record already has a column {name!r} from its samples: give yours another name")
        if np.shape(values) != (total,):
            raise ValueError(f"column {name!r} has the shape {np.shape(values)}, but the {len(samples)} samples have {total} tokens")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The sampled columns of a row, as pieces of arrays or as runs."""

    count: int
    tokens: list[Array]
    logprobs: list[Array]
    origin: list[tuple[Any, int]]
    loss_mask: list[tuple[Any, int]]
    versions: list[tuple[Any, int]]


class TokenColumns:
    """The per-token columns of a rollout's record, made for some rows at a time.

    Args:
        samples: samples of the rollout.
        columns: computed columns, over the tokens of all samples. [T]
    """

    def __init__(self, samples: Sequence[Sample], columns: Mapping[str, Array]) -> None:
        self._samples, self._columns = samples, {name: np.asarray(values) for name, values in columns.items()}
        self._names = [*COMPUTED, *(name for name in columns if name not in COMPUTED)]
        self._ends = np.cumsum([0, *(len(sample.tokens) for sample in samples)])
        """End of each sample's tokens, after a 0. [N + 1]"""

    def of(self, rows: Sequence[RecordRow], full: Sequence[bool]) -> dict[str, pa.Array]:
        """The columns of some rows; those that are not `full` have null in them."""
        out = _sampled(rows, full, self._samples)
        mine = [row.sample if has else None for row, has in zip(rows, full, strict=True)]
        without = np.array([sample is None for sample in mine], bool)
        sizes = np.array([0 if sample is None else self._ends[sample + 1] - self._ends[sample] for sample in mine], np.int64)
        order = [sample for sample in mine if sample is not None]
        rewarded = [row.trajectory if has and row.sample is None and any(turn.token_rewards for turn in row.trajectory.turns) else None
                    for row, has in zip(rows, full, strict=True)]  # fmt: skip
        for name in self._names:
            kind, values = COMPUTED.get(name, OTHER), self._columns.get(name)
            if name == "token_rewards" and any(rewarded):
                out[name] = self._token_rewards(mine, rewarded, values)
            elif values is None:
                out[name] = pa.nulls(len(rows), pa.list_(kind))
            else:
                out[name] = _lists(sizes, without, _numbers(self._in_order(values, order), kind))
        return out

    def _in_order(self, values: Array, order: Sequence[int]) -> Array:
        """The values of some samples, one after another; a part of the array itself where these follow each other."""
        if not order:
            return values[:0]
        first, last = order[0], order[-1]
        if list(order) == list(range(first, last + 1)):
            return values[self._ends[first] : self._ends[last + 1]]
        return np.concatenate([self._of_one(values, sample) for sample in order])

    def _of_one(self, values: Array, sample: int) -> Array:
        return values[self._ends[sample] : self._ends[sample + 1]]

    def _token_rewards(self, mine: Sequence[int | None], rewarded: Sequence[Trajectory | None], values: Array | None) -> pa.Array:
        """Rewards of tokens: of the rows' samples, and of trajectories that gave none."""
        pieces: list[Array | None] = []
        for sample, trajectory in zip(mine, rewarded, strict=True):
            if sample is not None:
                pieces.append(None if values is None else self._of_one(values, sample))
            else:
                pieces.append(None if trajectory is None else np.concatenate([_rewards(turn) for turn in trajectory.turns]))
        sizes = np.array([0 if piece is None else len(piece) for piece in pieces], np.int64)
        flat = np.concatenate([piece for piece in pieces if piece is not None])
        return _lists(sizes, np.array([piece is None for piece in pieces], bool), _numbers(flat, OTHER))


def _sampled(rows: Sequence[RecordRow], full: Sequence[bool], samples: Sequence[Sample]) -> dict[str, pa.Array]:
    """The columns that come with the samples."""
    found = [(_of_turns(row.trajectory) if row.sample is None else _of_sample(samples[row.sample])) if has else None
             for row, has in zip(rows, full, strict=True)]  # fmt: skip
    there = [each for each in found if each is not None]
    sizes = np.array([0 if each is None else each.count for each in found], np.int64)
    missing = np.array([each is None for each in found], bool)
    out: dict[str, pa.Array] = {}
    for name, kind in SAMPLED.items():
        dtype = kind.to_pandas_dtype()
        pieces = [piece for each in there for piece in getattr(each, name)]
        if name in ("tokens", "logprobs"):
            values = np.concatenate(pieces) if pieces else np.empty(0, dtype)
        else:
            values = np.repeat(np.array([value for value, _ in pieces], dtype), np.array([count for _, count in pieces], np.int64))
        out[name] = _lists(sizes, missing, pa.array(values))
    return out


def _of_sample(sample: Sample) -> _Tokens:
    runs = (sample.origin.runs(), sample.loss_mask.runs(), sample.versions.runs())
    return _Tokens(len(sample.tokens), [sample.tokens.numpy()], [sample.logprobs.numpy()], *runs)


def _of_turns(trajectory: Trajectory) -> _Tokens:
    """The tokens of a trajectory that gave no sample: its turns' contexts and tokens, none of them trained."""
    turns = trajectory.turns
    count = sum(len(turn.context) + len(turn.tokens) for turn in turns)
    return _Tokens(
        count,
        tokens=[piece.numpy() for turn in turns for piece in (turn.context, turn.tokens)],
        logprobs=[piece.numpy() for turn in turns for piece in (Floats.zeros(len(turn.context)), turn.logprobs)],
        origin=[run for turn in turns for run in (*turn.context_origin.runs(), (Origin.MODEL, len(turn.tokens)))],
        loss_mask=[(False, count)],
        versions=[run for turn in turns for run in ((UNSAMPLED, len(turn.context)), *turn.versions.runs())],
    )


def _numbers(values: Array, kind: pa.DataType) -> pa.Array:
    """Numbers, with null for NaN."""
    there = values == values  # all but NaN
    count = len(values) - int(np.count_nonzero(there))
    if count and not pa.types.is_floating(kind):
        values = np.where(there, values, 0)
    values = np.ascontiguousarray(values, kind.to_pandas_dtype())
    valid = pa.py_buffer(np.packbits(there, bitorder="little")) if count else None
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)], count)


def _lists(sizes: Array, missing: Array, values: pa.Array) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(missing) if missing.any() else None)


def _rewards(turn: Turn) -> Array:
    found = np.zeros(len(turn.context) + len(turn.tokens), np.float32)
    if turn.token_rewards:
        found[len(turn.context) :] = turn.token_rewards.numpy()
    return found
