"""Attention over a forest: a row in which sequences with the same beginning share its tokens.

A row is a list of segments in depth-first order, each continuing its parent. A token sees its segment's
ancestors and, causally, its own segment. All segments below a segment follow directly behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from whet.model.attention import similar
from whet.model.joined_attention import AttentionParts, Cross, Own, joined_attention

CHUNK = 128
"""Tokens of a chunk that attends to itself."""
OWN_TOKENS = 2048
"""Tokens of the chunks that are attended to in one call."""
KEY_BLOCK = 1024
"""Keys of a part."""
SCORES = 2**17
"""Scores that a part has for each head: what processors keep in their caches."""
FLEX_BLOCK = 128
"""Rows are padded to a multiple of it for flex_attention, whose block it is."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that follow each other; nothing branches off but behind the last one."""

    length: int
    parent: int
    """Index of the segment that it goes on from; -1: it begins a sequence."""


@dataclass(frozen=True, slots=True)
class Span:
    """Range of a segment in its row: tokens `start` to `end`, and all segments below it from `end` to
    `stop`."""

    start: int
    end: int
    stop: int
    depth: int
    """Tokens that come before it in its sequences."""


def spans_of(segments: Sequence[Segment]) -> list[Span]:
    """Ranges of segments.

    Raises:
        ValueError: if they are not in depth-first order.
    """
    ends: list[int] = []
    depths: list[int] = []
    path: list[int] = []  # the segment before this one, and its ancestors
    for i, (length, parent) in enumerate((s.length, s.parent) for s in segments):
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise ValueError(f"segment {i} goes on from segment {parent}, which is no ancestor of the one before it")
        path.append(i)
        depths.append(depths[parent] + segments[parent].length if parent >= 0 else 0)
        ends.append((ends[-1] if ends else 0) + length)
    stops = list(ends)
    for i in reversed(range(len(segments))):
        if segments[i].parent >= 0:
            stops[segments[i].parent] = max(stops[segments[i].parent], stops[i])
    return [Span(end - s.length, end, stop, depth) for s, end, stop, depth in zip(segments, ends, stops, depths, strict=True)]


class ForestRow:
    """Attention over a forest by matrix products: on any device, of any dtype and head size.

    What a token sees is cut into stretches: its own chunk, which it sees causally, and earlier ones, which it sees whole along with all
    that come after them in the tree. Shared keys and values are read in place, and gather the gradients of every branch.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        spans = spans_of(segments)
        self.positions = _positions(spans).to(device)
        chunks = [chunk for span in spans for chunk in _cut(span.start, span.end, CHUNK)]
        self.parts = AttentionParts(list(_own(chunks, len(self.positions), device)), list(_cross(spans)))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return joined_attention(q, k, v, scale, self.parts)


class FlexForestRow:
    """Attention over a forest by torch's flex_attention, compiled, with a block mask: for CUDA.

    No CUDA device has run this yet. The tests run flex_attention's uncompiled forward on the CPU with the same mask.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        spans = spans_of(segments)
        self.positions = _positions(spans).to(device)
        padded = -(-len(self.positions) // FLEX_BLOCK) * FLEX_BLOCK
        self._padding = padded - len(self.positions)
        stops = torch.cat([torch.full((s.end - s.start,), s.stop) for s in spans] + [torch.arange(padded - self._padding, padded) + 1])
        self._mask = block_mask(stops, device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        padded = (F.pad(x, (0, 0, 0, 0, 0, self._padding)).transpose(0, 1)[None] for x in (q, k, v))
        out = compiled_flex()(*padded, block_mask=self._mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)[: len(q)]


def block_mask(stops: Tensor, device: torch.device) -> BlockMask:
    """Which blocks of keys each block of queries sees, whole or in part: found block by block, never for each pair of tokens.

    Args:
        stops: for each token of a row, the first behind it that does not see it; a multiple of `FLEX_BLOCK` of them, on the CPU. [T]
        device: device of the row.
    """
    blocks = stops.view(-1, FLEX_BLOCK)
    begins = torch.arange(len(blocks))[:, None] * FLEX_BLOCK
    earlier, same = begins > begins.T, begins == begins.T
    some = earlier & (blocks.amax(1)[None] > begins) | same
    whole = earlier & (blocks.amin(1)[None] >= begins + FLEX_BLOCK)
    on_device = stops.to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < on_device[key])

    counts = [_block_list(which, device) for which in (some & ~whole, whole)]
    return BlockMask.from_kv_blocks(*counts[0], *counts[1], BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees)


def _block_list(which: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, and a permutation with their indices first. [1, 1, N]
    int32, [1, 1, N, N] int32"""
    order = which.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return which.sum(1, dtype=torch.int32)[None, None].to(device), order.to(torch.int32)[None, None].to(device)


@cache
def compiled_flex() -> Any:
    """flex_attention as one kernel. Uncompiled it holds every score: what cannot be compiled is an error, never run so."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def forest_row(segments: Sequence[Segment], device: torch.device, dtype: torch.dtype) -> ForestRow | FlexForestRow:
    """The implementation for a device: flex_attention's kernel for CUDA, but for float64, which it does not have."""
    if device.type == "cuda" and dtype != torch.float64:
        return FlexForestRow(segments, device)
    return ForestRow(segments, device)


def _positions(spans: Sequence[Span]) -> Tensor:
    return torch.cat([torch.arange(s.depth, s.depth + s.end - s.start) for s in spans])


def _cut(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    for place in range(start, end, size):
        yield place, min(place + size, end)


def _own(chunks: Sequence[tuple[int, int]], num_tokens: int, device: torch.device) -> Iterator[Own]:
    """Chunks of similar length together."""
    for members in similar([end - start for start, end in chunks], max_waste=1.3):
        length = chunks[members[0]][1] - chunks[members[0]][0]
        for a, b in _cut(0, len(members), max(OWN_TOKENS // length, 1)):
            bounds = torch.tensor([chunks[i] for i in members[a:b]])
            places = bounds[:, :1] + torch.arange(length)
            gather = torch.where(places < bounds[:, 1:], places, num_tokens)
            yield Own(gather.flatten().to(device), b - a, length)


def _cross(spans: Sequence[Span]) -> Iterator[Cross]:
    """Queries and keys of attention between segments: each chunk of a segment with the segment before
    it, and everything below a segment with that segment."""
    for span in spans:
        for a, b in _cut(span.start, span.end, CHUNK):
            yield from (Cross(slice(a, b), slice(*keys)) for keys in _cut(span.start, a, KEY_BLOCK))
        for keys in _cut(span.start, span.end, KEY_BLOCK):
            for queries in _cut(span.end, span.stop, max(SCORES // (keys[1] - keys[0]), 1)):
                yield Cross(slice(*queries), slice(*keys))
