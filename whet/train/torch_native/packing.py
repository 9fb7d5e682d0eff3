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
    used: list[int] = []
    for i, length in enumerate(lengths):
        row = next((r for r, total in enumerate(used) if total + length <= max_tokens), None)
        if row is None:
            rows.append([i])
            used.append(length)
        else:
            rows[row].append(i)
            used[row] += length
    return rows


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
