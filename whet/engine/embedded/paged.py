"""One engine step as tensors: the row of new tokens, and attention that writes the cache and reads each sequence's blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whet.engine.embedded.cache import KVStore
from whet.engine.embedded.rows import DecodeRows, RowAssignment, RowIndices, tables
from whet.engine.embedded.scheduler import Sequence

PlannedTokens = tuple[Sequence, int]
"""A sequence and how many of its pending tokens the step computes."""


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Sequences of one step that are attended to together, padded to the longest."""

    start: int
    stop: int
    """Their new tokens' part of the step's row."""
    source: Tensor | RowIndices
    """Source of the keys and values to read: a block table to gather them by, [B, NB] int64, or the
    rows that decoding keeps."""
    visible: Tensor
    """Which cached tokens each query sees. [B, 1, Q, NB * block_size] bool"""
    queries: Tensor | None
    """Index in their part of the row of each padded query; None for decoding, one query each. [B, Q] int64"""
    place: Tensor | None
    """For each real query, its index among the padded ones. [stop - start] int64"""


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of the model for one step of T new tokens."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    attend: PagedAttend


class PagedAttend:
    """Attention of one engine step: writes the new keys and values, then reads each sequence's blocks."""

    def __init__(self, store: KVStore, slots: Tensor, rows: Seq[PaddedRows]) -> None:
        self._store, self._slots, self._rows = store, slots, rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self._store.write(layer, self._slots, k, v)
        outs: list[Tensor] = []
        for rows in self._rows:
            part = slice(rows.start, rows.stop)
            if isinstance(rows.source, RowIndices):
                keys, values = rows.source.take(layer, self._store, k[part], v[part])
            else:
                keys, values = self._store.read(layer, rows.source)
            attend = decode_attention if rows.queries is None else _prefill
            outs.append(attend(q[part], keys, values, rows, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, rows: PaddedRows, scale: float) -> Tensor:
    """One query per sequence: the query heads that share a kv head go in as that head's queries."""
    num, heads, dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.view(num, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.visible, scale=scale)
    return out.reshape(num, heads, out.shape[-1])


def _prefill(q: Tensor, keys: Tensor, values: Tensor, rows: PaddedRows, scale: float) -> Tensor:
    assert rows.queries is not None and rows.place is not None
    num, width = rows.queries.shape
    heads = q.shape[1]
    padded = q.index_select(0, rows.queries.flatten()).view(num, width, *q.shape[1:]).transpose(1, 2)
    if q.is_cuda:  # its kernels that take a mask take no groups of heads; the one that takes both holds every score
        out = grouped_attention(padded, keys, values, rows.visible, scale)
    else:
        out = F.scaled_dot_product_attention(
            padded, keys, values, attn_mask=rows.visible, scale=scale, enable_gqa=heads != keys.shape[1]
        )
    return out.transpose(1, 2).reshape(num * width, heads, out.shape[-1]).index_select(0, rows.place)


def grouped_attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Masked attention in which the query heads that share a kv head go in as that head's queries.

    Args:
        q: [B, heads, Q, D]
        keys: [B, kv_heads, K, D]; values: [B, kv_heads, K, Dv].
        visible: [B, 1, Q, K] bool
        scale: factor of the scores.

    Returns:
        [B, heads, Q, Dv].
    """
    num, heads, width, _ = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    mask = visible.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(q.reshape(num, kv_heads, group * width, -1), keys, values, attn_mask=mask, scale=scale)
    return out.reshape(num, heads, width, -1)


@dataclass(frozen=True, slots=True)
class PaddedPart:
    """Sequences of a step that are padded together."""

    planned: list[PlannedTokens]
    assignment: RowAssignment | None = None
    """Rows of the decoding sequences."""


def buckets(plan: Seq[PlannedTokens], rows: DecodeRows) -> list[PaddedPart]:
    """The plan in parts that are padded together: decoding by the length of its rows, then prefill of lengths within a factor of two.

    Raises:
        StaleCache: if rows that older weights filled were not dropped.
    """
    decoding = rows.assign([sequence for sequence, new in plan if new == 1])
    parts = [PaddedPart([(sequence, 1) for sequence in together], assignment) for together, assignment in decoding]
    chunks: list[list[PlannedTokens]] = []
    for item in sorted((item for item in plan if item[1] > 1), key=lambda item: (-item[1], -item[0].num_cached_tokens)):
        if chunks and _similar(chunks[-1][0], item):
            chunks[-1].append(item)
        else:
            chunks.append([item])
    return parts + [PaddedPart(chunk) for chunk in chunks]


def lay_out(parts: Seq[PaddedPart], store: KVStore, device: torch.device) -> StepInput:
    """The tensors of a step that computes the given buckets, in their order."""
    size = store.block_size
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[PaddedRows] = []
    for part in parts:
        start = len(tokens)
        for sequence, new in part.planned:
            span = range(sequence.num_cached_tokens, sequence.num_cached_tokens + new)
            tokens += sequence.tokens[span.start : span.stop]
            positions += span
            slots += [sequence.blocks[place // size] * size + place % size for place in span]
        rows.append(_rows(part, start, size, device))
    tokens_T, positions_T, slots_T = (torch.tensor(column, device=device) for column in (tokens, positions, slots))
    return StepInput(tokens_T, positions_T, PagedAttend(store, slots_T, rows))


def _similar(longest: PlannedTokens, item: PlannedTokens) -> bool:
    if longest[1] > 2 * item[1] + 64:
        return False
    short, long = sorted((longest[0].num_cached_tokens + longest[1], item[0].num_cached_tokens + item[1]))
    return long <= 2 * short + 64


def _rows(part: PaddedPart, start: int, block_size: int, device: torch.device) -> PaddedRows:
    """One bucket, whose new tokens begin at `start` in the step's row."""
    cached, new = (np.array(column) for column in zip(*((s.num_cached_tokens, count) for s, count in part.planned), strict=True))
    width, longest = -(-int((cached + new).max()) // block_size), int(new.max())
    places = torch.arange(width * block_size, device=device)
    stop = start + int(new.sum())
    sequences = [sequence for sequence, _ in part.planned]
    source = tables(sequences, width).to(device) if part.assignment is None else part.assignment.on(device, width)
    if longest == 1:
        visible = places <= torch.from_numpy(cached).to(device)[:, None, None, None]
        return PaddedRows(start, stop, source, visible, None, None)
    steps = np.arange(longest)
    inside = steps < new[:, None]
    # A padded query sees its sequence's first token, so that no softmax is over nothing; its output is dropped.
    last_seen = torch.from_numpy(np.where(inside, cached[:, None] + steps, 0)).to(device)
    visible = (places <= last_seen[:, :, None])[:, None]
    begins = (new.cumsum() - new)[:, None]
    queries = torch.from_numpy(np.where(inside, begins + steps, begins)).to(device)
    place = torch.from_numpy(np.flatnonzero(inside)).to(device)
    return PaddedRows(start, stop, source, visible, queries, place)
