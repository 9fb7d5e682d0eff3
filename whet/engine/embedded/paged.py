"""One engine step as tensors: the row of new tokens, and attention that writes the cache and reads each sequence's blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from whet.engine.embedded.cache import KVStore
from whet.engine.embedded.rows import DecodeRows, Seats, SeatsOn
from whet.engine.embedded.scheduler import Sequence

Planned = tuple[Sequence, int]
"""A sequence and how many of its pending tokens the step computes."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one step that are attended to together, padded to the longest."""

    start: int
    stop: int
    """Their new tokens' part of the step's row."""
    blocks: Tensor
    """Block table, padded with block 0. [B, NB] int64"""
    visible: Tensor
    """Which cached tokens each query sees. [B, 1, Q, NB * block_size] bool"""
    queries: Tensor | None
    """Index in their part of the row of each padded query; None for decoding, one query each. [B, Q] int64"""
    place: Tensor | None
    """For each real query, its index among the padded ones. [stop - start] int64"""
    seats: SeatsOn | None = None
    """Where decoding sequences have their keys and values side by side; None: they are gathered."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """What the model reads in one step of T new tokens."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    attend: PagedAttend


class PagedAttend:
    """Attention of one engine step: writes the new keys and values, then reads each sequence's blocks."""

    def __init__(self, store: KVStore, slots: Tensor, rows: Seq[Rows]) -> None:
        self._store, self._slots, self._rows = store, slots, rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self._store.write(layer, self._slots, k, v)
        outs: list[Tensor] = []
        for rows in self._rows:
            part = slice(rows.start, rows.stop)
            if rows.seats is None:
                keys, values = self._store.read(layer, rows.blocks)
            else:
                keys, values = rows.seats.take(layer, self._store, rows.blocks, k[part], v[part])
            attend = _decode if rows.queries is None else _prefill
            outs.append(attend(q[part], keys, values, rows, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _decode(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float) -> Tensor:
    """One query per sequence: the query heads that share a kv head go in as that head's queries."""
    num, heads, dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.view(num, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.visible, scale=scale)
    return out.reshape(num, heads, out.shape[-1])


def _prefill(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float) -> Tensor:
    assert rows.queries is not None and rows.place is not None
    num, width = rows.queries.shape
    heads = q.shape[1]
    padded = q.index_select(0, rows.queries.flatten()).view(num, width, *q.shape[1:]).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        padded, keys, values, attn_mask=rows.visible, scale=scale, enable_gqa=heads != keys.shape[1]
    )
    return out.transpose(1, 2).reshape(num * width, heads, out.shape[-1]).index_select(0, rows.place)


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a step that are padded together."""

    planned: list[Planned]
    seats: Seats | None = None
    """Where those that decode have their rows."""


def buckets(plan: Seq[Planned], rows: DecodeRows) -> list[Part]:
    """The plan in parts that are padded together: decoding by the length of its rows, then prefill of lengths within a factor of two.

    Raises:
        StaleCache: if rows that older weights filled were not dropped.
    """
    decoding = rows.seat([sequence for sequence, new in plan if new == 1])
    parts = [Part([(sequence, 1) for sequence in together], seats) for together, seats in decoding]
    chunks: list[list[Planned]] = []
    for item in sorted((item for item in plan if item[1] > 1), key=lambda item: (-item[1], -item[0].cached)):
        if chunks and _similar(chunks[-1][0], item):
            chunks[-1].append(item)
        else:
            chunks.append([item])
    return parts + [Part(chunk) for chunk in chunks]


def lay_out(parts: Seq[Part], store: KVStore, device: torch.device) -> StepInput:
    """The tensors of a step that computes the given buckets, in their order."""
    plan = list(chain.from_iterable(part.planned for part in parts))
    new = np.array([count for _, count in plan])
    cached = np.array([sequence.cached for sequence, _ in plan])
    ends = new.cumsum()
    owner = np.repeat(np.arange(len(plan)), new)
    positions = np.arange(ends[-1]) + (cached + new - ends)[owner]
    tables = np.zeros((len(plan), max(len(sequence.blocks) for sequence, _ in plan)), dtype=np.int64)
    for table, (sequence, _) in zip(tables, plan, strict=True):
        table[: len(sequence.blocks)] = sequence.blocks
    size = store.block_size
    slots = tables[owner, positions // size] * size + positions % size
    tokens = [sequence.tokens[sequence.cached : sequence.cached + count] for sequence, count in plan]
    rows: list[Rows] = []
    first = 0
    for part in parts:
        span = slice(first, first := first + len(part.planned))
        found = _rows(tables[span], cached[span], new[span], int(ends[span.start] - new[span.start]), size, device)
        rows.append(found if part.seats is None else replace(found, seats=part.seats.on(device)))
    return StepInput(
        torch.tensor(list(chain.from_iterable(tokens)), device=device),
        torch.from_numpy(positions).to(device),
        PagedAttend(store, torch.from_numpy(slots).to(device), rows),
    )


def _similar(longest: Planned, item: Planned) -> bool:
    if longest[1] > 2 * item[1] + 64:
        return False
    short, long = sorted((longest[0].cached + longest[1], item[0].cached + item[1]))
    return long <= 2 * short + 64


def _rows(
    tables: NDArray[np.int64],
    cached: NDArray[np.int64],
    new: NDArray[np.int64],
    start: int,
    block_size: int,
    device: torch.device,
) -> Rows:
    """One bucket: sequences whose `new` tokens [B] follow `cached` ones [B]; the first one's begin at `start` in the step's row."""
    width, longest = -(-int((cached + new).max()) // block_size), int(new.max())
    steps = np.arange(longest)
    inside = steps < new[:, None]
    # A padded query sees its sequence's first token, so that no softmax is over nothing; its output is dropped.
    last_seen = torch.from_numpy(np.where(inside, cached[:, None] + steps, 0)).to(device)
    visible = (torch.arange(width * block_size, device=device) <= last_seen[:, :, None])[:, None]
    blocks = torch.from_numpy(np.ascontiguousarray(tables[:, :width])).to(device)
    stop = start + int(new.sum())
    if longest == 1:
        return Rows(start, stop, blocks, visible, None, None)
    begins = (new.cumsum() - new)[:, None]
    queries = torch.from_numpy(np.where(inside, begins + steps, begins)).to(device)
    place = torch.from_numpy(np.flatnonzero(inside)).to(device)
    return Rows(start, stop, blocks, visible, queries, place)
