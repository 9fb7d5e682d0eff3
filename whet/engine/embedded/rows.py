"""Keys and values of decoding sequences side by side, kept from step to step, so that a decode step
reads them in place.

The block cache has the valid contents; a row is a copy of a sequence's blocks. Gathering the row again
at every step was about half of the step's time. A row is only used for the same sequence, of the same
length and under the same weights; otherwise it is gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.engine.base import StaleCache
from whet.engine.embedded.cache import BlockPool, KVStore
from whet.engine.embedded.scheduler import Sequence

MIN_BLOCKS = 4
"""Blocks of the shortest rows."""


@dataclass(slots=True)
class DecodeSlab:
    """Rows of one length, in one tensor for each layer."""

    capacity: int
    """Tokens per row."""
    num_rows: int = 0
    """Rows that its tensors have; those behind the members' are spare."""
    members: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences of the first rows."""
    lengths: list[int] = field(default_factory=list[int])
    """Tokens in each of them."""
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])
    """[num_rows, kv_heads, capacity, D], keys and values."""

    def assign(self, sequences: Seq[Sequence], max_rows: int) -> RowAssignment:
        """Give the first rows to these sequences, who get a token each in this step; `max_rows` is not less than their number."""
        num = len(sequences)
        wanted = set(sequences)
        kept = {s: row for row, s in enumerate(self.members) if s in wanted and self.lengths[row] == s.num_cached_tokens}
        stay = {row: s for s, row in kept.items() if row < num}
        moving = [s for s, row in kept.items() if row >= num]
        coming = [s for s in sequences if s not in kept]
        holes = [row for row in range(num) if row not in stay]
        moves = [(kept[s], row) for s, row in zip(moving, holes, strict=False)]
        loads = holes[len(moving) :]
        stay.update(zip(holes, moving + coming, strict=True))
        self.members = [stay[row] for row in range(num)]
        self.lengths = [s.num_cached_tokens + 1 for s in self.members]
        if num > self.num_rows:
            self.num_rows = min(max(num, 2 * self.num_rows), max_rows)
        elif 4 * num <= self.num_rows or self.num_rows > max_rows:
            self.num_rows = min(2 * num, max_rows)
        return RowAssignment(self, list(self.members), moves, loads)

    def room(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's rows, made for or brought to `num_rows`; k, v [*, kv_heads, D] tell what is kept."""
        pair = self.layers.get(layer)
        if pair is None or len(pair[0]) != self.num_rows:
            keys, values = (x.new_zeros(self.num_rows, x.shape[1], self.capacity, x.shape[2]) for x in (k, v))
            for new, old in zip((keys, values), pair or (), strict=False):
                count = min(len(new), len(old))
                new[:count] = old[:count]
            pair = self.layers[layer] = keys, values
        return pair

    @property
    def size_bytes(self) -> int:
        return sum(x.nbytes for pair in self.layers.values() for x in pair)


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """Rows of the decoding sequences of one step."""

    slab: DecodeSlab
    sequences: list[Sequence]
    """In the order of their rows, which are the first ones."""
    moves: list[tuple[int, int]]
    """Moves (from, to) of rows, done first."""
    loads: list[int]
    """Rows to gather from the blocks, after the moves."""

    def on(self, device: torch.device, num_blocks: int) -> RowIndices:
        """With its indices as tensors, made once for all layers; the longest sequence has `num_blocks` blocks."""
        moves = torch.tensor(self.moves, device=device).unbind(1) if self.moves else None
        loads = torch.tensor(self.loads, device=device) if self.loads else None
        blocks = tables([self.sequences[row] for row in self.loads], num_blocks).to(device)
        lengths = torch.tensor([s.num_cached_tokens for s in self.sequences], device=device)
        return RowIndices(self.slab, torch.arange(len(lengths), device=device), lengths, moves, loads, blocks)


@dataclass(frozen=True, slots=True)
class RowIndices:
    """A `RowAssignment` as tensors, for the layers of a step."""

    slab: DecodeSlab
    rows: Tensor
    """[B]"""
    places: Tensor
    """Place of each new token in its row. [B]"""
    moves: tuple[Tensor, ...] | None
    loads: Tensor | None
    """[L]"""
    blocks: Tensor
    """The block table of the rows that are loaded. [L, NB]"""

    def take(self, layer: int, store: KVStore, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's rows with this step's keys and values k, v [B, kv_heads, D], which are in the sequences' blocks already.

        Returns:
            [B, kv_heads, NB * block_size, D], twice.
        """
        num, width = len(self.rows), self.blocks.shape[1] * store.block_size
        if self.moves is not None:
            source, target = self.moves
            for rows in self.slab.layers[layer]:
                rows[target, :, :width] = rows[source, :, :width]
        pair = self.slab.room(layer, k, v)
        if self.loads is not None:
            for rows, gathered in zip(pair, store.read(layer, self.blocks), strict=True):
                rows[self.loads, :, :width] = gathered
        for rows, new in zip(pair, (k, v), strict=True):
            rows[self.rows, :, self.places] = new
        return pair[0][:num, :, :width], pair[1][:num, :, :width]


class DecodeRows:
    """Slabs by length, doubling from one to the next, so that a sequence moves on seldom.

    Args:
        store: the block cache.
        pool: tells under which weights the rows were filled. All rows together take no more places than its blocks; a sequence that finds
            no room is gathered from its blocks at every step.
    """

    def __init__(self, store: KVStore, pool: BlockPool) -> None:
        self._store, self._pool = store, pool
        self._slabs: dict[int, DecodeSlab] = {}
        self._epoch = pool.epoch

    def assign(self, sequences: Seq[Sequence]) -> list[tuple[list[Sequence], RowAssignment | None]]:
        """Give rows to the sequences that decode in this step, by length; rows of others are given up.

        Returns:
            The sequences that are computed together, and their rows; None: they are gathered.

        Raises:
            StaleCache: if rows that older weights filled were not dropped.
        """
        if self._slabs and self._epoch != self._pool.epoch:
            raise StaleCache(f"{self.num_tokens} tokens lie ready for decoding from the weights of an older version: they were not dropped")
        self._epoch = self._pool.epoch
        block_size, room = self._store.block_size, self._store.num_blocks * self._store.block_size
        groups: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(capacity_for(sequence.num_cached_tokens + 1, block_size), []).append(sequence)
        parts: list[tuple[list[Sequence], RowAssignment | None]] = []
        old, self._slabs = self._slabs, {}
        for capacity, group in sorted(groups.items()):
            fit = room // capacity
            if fit:
                slab = self._slabs[capacity] = old.get(capacity) or DecodeSlab(capacity)
                assignment = slab.assign(group[:fit], fit)
                parts.append((assignment.sequences, assignment))
                room -= slab.num_rows * capacity
            if group[fit:]:
                parts.append((group[fit:], None))
        return parts

    @property
    def num_tokens(self) -> int:
        """In all rows."""
        return sum(sum(slab.lengths) for slab in self._slabs.values())

    @property
    def size_bytes(self) -> int:
        return sum(slab.size_bytes for slab in self._slabs.values())

    def clear(self) -> None:
        """Drop all rows and free their memory."""
        self._slabs.clear()


def capacity_for(num_tokens: int, block_size: int) -> int:
    """Capacity of a row for a sequence of `num_tokens` tokens."""
    capacity = MIN_BLOCKS * block_size
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def tables(sequences: Seq[Sequence], num_blocks: int) -> Tensor:
    """Block tables, padded with block 0. [B, num_blocks] int64"""
    return torch.from_numpy(block_tables(sequences, num_blocks))


def block_tables(sequences: Seq[Sequence], num_blocks: int) -> NDArray[np.int64]:
    """The same as an array."""
    out = np.zeros((len(sequences), num_blocks), dtype=np.int64)
    for table, sequence in zip(out, sequences, strict=True):
        blocks = sequence.blocks[:num_blocks]
        table[: len(blocks)] = blocks
    return out
