"""Limits of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass

CLOSE_TIMEOUT_S = 30.0
"""Seconds for an environment or a resource to close, regardless of the trajectory's limits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a trajectory."""

    max_turns: int
    max_tokens: int
    """Tokens of the whole trajectory: prompt, replies and the environment's answers. If the history is
    rewritten, each chain has this limit."""
    max_turn_tokens: int
    """Sampled in one turn."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_turn_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
