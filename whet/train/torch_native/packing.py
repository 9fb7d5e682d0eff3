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
