"""Where a trajectory is cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a trajectory is cut."""

    max_turns: int
    max_tokens: int
    """Of the whole trajectory: prompt, replies and the environment's answers. Where the history was rewritten, of each chain."""
    max_turn_tokens: int
    """Sampled in one turn."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "max_turn_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
