"""`[observe.records]`: rule for what is recorded of a run, and for how long it stays."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from whet.config import Config


class RecordsConfig(Config):
    """Records of every token in `rollouts/` (docs/records.md)."""

    every: NonNegativeInt = 1
    """Record every n-th rollout; 0 never does."""
    trajectories: NonNegativeInt | None = None
    """Number of trajectories of each rollout that have their tokens, the first ones. All have a row.
    Unset: all."""
    keep: PositiveInt | None = None
    """Number of newest record files that stay; the index of older ones stays, too. Unset: all."""
