"""A reward that varies whatever the model writes, for `grpo_step.py`: the processes that score it import nothing else."""

from __future__ import annotations

from typing import Any


def score(trajectory: Any) -> float:
    """By the reply's length."""
    return len(trajectory.response) % 7 / 7
