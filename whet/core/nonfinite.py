"""Training that has diverged."""

from __future__ import annotations

from typing import Literal

from whet.core.batch import TrainBatch
from whet.types import RunFailed

Learner = Literal["policy", "critic"]
"""The models that learn in a run."""


class NonFinite(RunFailed):
    """The loss or a gradient is NaN or infinite; no weight was changed by it, and the gradients so far are dropped."""

    batch: TrainBatch | None = None
    """Batch of the optimizer step, once it is known."""
    learner: Learner = "policy"
    """Learner whose step it was."""
