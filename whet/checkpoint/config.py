"""`[checkpoint]`: when a run is saved, what is kept, and what it begins with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config

CheckpointPart = Literal["weights", "optimizer", "data", "random", "counters"]
"""A part of a checkpoint that can be restored by itself. The optimizer's part holds its position in the
schedule."""


class RestoreConfig(Config):
    """Begin a new run with parts of another run's checkpoint."""

    path: str
    """A run's folder (its newest checkpoint), or one checkpoint's folder."""
    parts: list[CheckpointPart] = Field(default=["weights"], min_length=1)
    """Parts of the checkpoint to restore: weights; optimizer (moments, masters and place in the
    schedule); data (the cursor); random (generators' states); counters. With all of them the run
    continues exactly as the other would have."""

    @model_validator(mode="after")
    def _consistent(self) -> RestoreConfig:
        if "optimizer" in self.parts and "weights" not in self.parts:
            raise ValueError("the optimizer's state belongs to the checkpoint's weights: add weights to parts, or drop optimizer")
        return self

    @property
    def goes_on(self) -> bool:
        """True if the new run continues the other run's count of steps; false if it only begins with
        the other run's state."""
        return "counters" in self.parts


class CheckpointConfig(Config):
    """When to save, what to keep, and what to begin with."""

    interval: int | None = Field(default=50, gt=0)
    """Rollouts (or steps of supervised training) between two checkpoints; another one follows at the
    end. none: only at the end."""
    keep: int = Field(default=2, gt=0)
    """Checkpoints that stay on disk; older ones are removed."""
    best: str | None = None
    """Also keep the checkpoint with the best value of this metric, for example eval/test/reward/total; an evaluation that reaches a new
    best saves at once."""
    best_mode: Literal["max", "min"] = "max"
    """Direction of `best`: max if a higher value is better, min if a lower one is."""
    resume: bool | Literal["fresh"] = True
    """Go on from the newest checkpoint in the run's folder, if there is one; false: refuse such a folder;
    fresh: rename the folder, and begin again from the start."""
    async_save: bool = False
    """Train on while a checkpoint is written. Each process first copies its part of the weights and the
    optimizer into its machine's memory (in all as many bytes as the checkpoint has); the next save
    waits for the one before."""
    restore: RestoreConfig | None = None
    """Checkpoint that a run without its own checkpoint starts from."""

    @model_validator(mode="after")
    def _consistent(self) -> CheckpointConfig:
        if self.best is None and self.best_mode == "min":
            raise ValueError("best_mode says which value of checkpoint.best is the best; set best, too")
        return self
