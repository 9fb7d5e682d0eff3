"""Samples that begin alike share the tokens they begin with: which of them share a row, and what the row's tokens are.

Sorted by their tokens, sequences with a common prefix are neighbours, and a prefix that two of them share is shared by all between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from whet.model.forest import Segment


@dataclass(frozen=True, slots=True)
class Forest:
    """Sequences as a radix forest: every distinct prefix has one token."""

    tokens: Tensor
    """In depth-first order. [U] int64"""
    segments: tuple[Segment, ...]
    """Their lengths sum to U."""
    place: Tensor
    """Index in `tokens` of each token of the sequences, in the given order. [T] int64"""


@dataclass(frozen=True, slots=True)
class Sorted:
    """Sequences in the order of their tokens."""

    order: list[int]
    shared: list[int]
    """Number of first tokens that each sequence shares with the one before it, in this order."""

    def num_tokens(self, start: int, end: int, lengths: Sequence[int]) -> int:
        """Distinct prefixes of a stretch of them."""
        return sum(lengths[self.order[i]] - (self.shared[i] if i > start else 0) for i in range(start, end))


def forest_of(sequences: Sequence[Tensor]) -> Forest:
    """The forest of some sequences of at least one token each, on the CPU. It does not depend on their order."""
    found = sort_sequences(sequences)
    places: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(sequences)
    pieces: list[Tensor] = []
    before = places[0]
    parent_of = {0: -1}  # by the first token of a segment, the token that it goes on from
    used = 0
    for i, shared in zip(found.order, found.shared, strict=True):
        own = sequences[i][shared:]
        parent = int(before[shared - 1]) if shared else -1
        if len(own) and parent != used - 1:
            parent_of[used] = parent
            parent_of.setdefault(parent + 1, parent)
        before = places[i] = torch.cat([before[:shared], torch.arange(used, used + len(own))])
        pieces.append(own)
        used += len(own)
    starts = sorted(parent_of)
    lengths = [end - start for start, end in zip(starts, [*starts[1:], used], strict=True)]
    parents = [bisect_right(starts, parent_of[start]) - 1 for start in starts]
    segments = tuple(Segment(length, parent) for length, parent in zip(lengths, parents, strict=True))
    return Forest(torch.cat(pieces), segments, torch.cat(places))


def sort_sequences(sequences: Sequence[Tensor]) -> Sorted:
    """By their tokens; equal ones in the order given."""
    keys = [sequence.numpy().astype(">i4").tobytes() for sequence in sequences]  # big-endian: bytes compare as the ids do
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = [0] * len(order)
    for i in range(1, len(order)):
        shared[i] = _num_shared(sequences[order[i - 1]], sequences[order[i]])
    return Sorted(order, shared)


def _num_shared(a: Tensor, b: Tensor) -> int:
    size = min(len(a), len(b))
    differ = (a[:size] != b[:size]).nonzero()
    return int(differ[0]) if len(differ) else size


def pack_forests(sequences: Sequence[Tensor], max_tokens: int) -> tuple[list[list[int]], int]:
    """Which sequences share a row of at most `max_tokens` distinct prefixes. A sequence over the budget sits alone.

    The largest subtrees that fit, with the path that leads to them, go into the first row that has room for what they add to it: so a
    tree over the budget is cut where least is repeated.

    Returns:
        Indices of each row, ascending within a row, and the tokens of all rows together.
    """
    found = sort_sequences(sequences)
    lengths = [len(sequence) for sequence in sequences]
    rows: list[list[int]] = []
    used: list[int] = []
    shared: list[int] = []  # what the next subtree begins with that each row holds
    for start, end in _subtrees(found, lengths, max_tokens):
        shared = [min(have, found.shared[start]) for have in shared]
        size = found.num_tokens(start, end, lengths)
        row = next((r for r, total in enumerate(used) if total + size - shared[r] <= max_tokens), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
            shared.append(0)
        rows[row] += found.order[start:end]
        used[row] += size - shared[row]
        inside = min(found.shared[start + 1 : end], default=max(lengths))
        shared = [min(have, inside) for have in shared]
        shared[row] = lengths[found.order[end - 1]]
    return [sorted(row) for row in rows], sum(used)


def _subtrees(found: Sorted, lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """The largest subtrees within the budget, or single sequences, as stretches of the sorted ones, in order."""
    out: list[tuple[int, int]] = []
    stack = [(0, len(lengths))] if lengths else []
    while stack:
        start, end = stack.pop()
        if end - start == 1 or found.num_tokens(start, end, lengths) <= max_tokens:
            out.append((start, end))
            continue
        least = min(found.shared[start + 1 : end])
        cuts = [start, *(i for i in range(start + 1, end) if found.shared[i] == least), end]
        stack += reversed(list(pairwise(cuts)))
    return out
