"""Corrections of a reward that depend on the trajectory's shape alone."""

from __future__ import annotations


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Soft overlong punishment: 0 up to max_length - buffer tokens, then falling to -factor at max_length and on, linearly.

    Source: DAPO, arXiv 2503.14476, eq. 13.

    Args:
        length: sampled tokens.
        max_length: the token limit.
        buffer: tokens before the limit over which the penalty grows.
        factor: the penalty at the limit.
    """
    if buffer <= 0:
        raise ValueError(f"the buffer of the overlong penalty must be positive, not {buffer}")
    return min(-(length - (max_length - buffer)) / buffer * factor, 0.0)
