"""Cutting a list of costs into parts of equal sum: the largest differencing method of Karmarkar and Karp.

Source: N. Karmarkar and R. Karp, "The differencing method of set partitioning", 1982.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import total_ordering


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """Items of one part, in the order in which they came."""

    total: float = 0
    size: int = 0
    items: tuple[tuple[int, float], ...] = ()
    """Index and cost."""

    def join(self, other: _Part) -> _Part:
        return _Part(self.total + other.total, self.size + other.size, self.items + other.items)


@total_ordering
class _Partial:
    """Parts of some of the items, the largest first. The heap's first is the one whose parts differ most."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = sorted(parts, reverse=True)

    @property
    def spread(self) -> float:
        return self.parts[0].total - self.parts[-1].total

    def __lt__(self, other: _Partial) -> bool:
        return (self.spread, self.parts[0]) > (other.spread, other.parts[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Partial) and (self.spread, self.parts[0]) == (other.spread, other.parts[0])

    def join(self, other: _Partial) -> _Partial:
        """The largest with the smallest."""
        return _Partial([mine.join(theirs) for mine, theirs in zip(self.parts, reversed(other.parts), strict=True)])


def balanced_parts(costs: Sequence[float], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Cut items into parts whose costs add up to about the same.

    Args:
        costs: cost of each item.
        num_parts: number of parts.
        equal_size: True if every part has the same number of items.

    Returns:
        Indices of each part's items, ascending; the part of the largest cost first.

    Raises:
        ValueError: if there are fewer items than parts, or, for parts of one size, no whole number of items for each.
    """
    if len(costs) < num_parts:
        raise ValueError(f"{len(costs)} items cannot make {num_parts} parts; give each part at least one")
    if equal_size and len(costs) % num_parts:
        raise ValueError(f"{len(costs)} items cannot make {num_parts} parts of one size: it is no multiple")
    ascending = sorted((cost, i) for i, cost in enumerate(costs))
    taken = num_parts if equal_size else 1
    empty = [_Part()] * (num_parts - taken)
    heap = [
        _Partial([*(_Part(cost, 1, ((i, cost),)) for cost, i in ascending[start : start + taken]), *empty])
        for start in range(0, len(ascending), taken)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        most = heapq.heappop(heap)
        heapq.heappush(heap, most.join(heapq.heappop(heap)))
    return [sorted(i for i, _ in part.items) for part in heap[0].parts]
