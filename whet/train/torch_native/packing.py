"""Which samples share a row."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First-fit, in order: each sample goes into the first row that has room. A sample over the budget sits alone.

    Args:
        lengths: tokens of each sample.
        max_tokens: tokens of a row.

    Returns:
        Sample indices of each row, ascending within a row.
    """
    rows: list[list[int]] = []
    room = _Room(len(lengths), max_tokens)
    for i, length in enumerate(lengths):
        row = room.first(length) if length <= max_tokens else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        room.use(row, length)
    return rows


class _Room:
    """Room left in each row: a tree of maxima, so that the first row with enough of it is found in logarithmic time.

    Args:
        num_rows: rows, all empty.
        size: tokens of a row.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        self._leaves = 1 << max(0, num_rows - 1).bit_length()
        self._most = [size] * (2 * self._leaves)

    def first(self, length: int) -> int:
        """The first row that has room for `length` tokens; one has."""
        node = 1
        while node < self._leaves:
            node = 2 * node if self._most[2 * node] >= length else 2 * node + 1
        return node - self._leaves

    def use(self, row: int, length: int) -> None:
        """Take room from a row."""
        node, most = row + self._leaves, self._most
        most[node] -= length
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])


def pack_units(units: Sequence[Sequence[int]], sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """`pack` for samples that must not be parted: each unit is in one row, its samples in their order.

    Args:
        units: sample indices of each unit.
        sizes: tokens of each unit.
        max_tokens: tokens of a row; a unit over it sits alone.
    """
    return [[i for unit in row for i in units[unit]] for row in pack(sizes, max_tokens)]


def split_rows(rows: Sequence[Sequence[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """As many rows as asked for, by cutting the longest row of several samples in two until there are enough.

    Its samples go, longest first, to the shorter half, so no row gets longer. The first half takes the row's place and the
    second goes to the end.

    Raises:
        ValueError: if there are fewer samples than rows asked for.
    """
    out = [list(row) for row in rows]
    while len(out) < count:
        total, place = max((sum(lengths[i] for i in row), k) if len(row) > 1 else (-1, k) for k, row in enumerate(out))
        if total < 0:
            raise ValueError(f"{len(out)} samples cannot make {count} rows; give each row at least one")
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0, 0]
        for i in sorted(out[place], key=lambda i: -lengths[i]):
            half = 0 if sums[0] <= sums[1] else 1
            halves[half].append(i)
            sums[half] += lengths[i]
        out[place] = halves[0]
        out.append(halves[1])
    return out
