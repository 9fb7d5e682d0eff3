"""The publisher seam: weights from the trainer to the engines, with a receipt for each version."""

from __future__ import annotations

from typing import Protocol

from whet.types import Receipt


class SyncError(RuntimeError):
    """An engine does not hold what the trainer holds. No token is sampled under the new version."""


class Publisher(Protocol):
    """Brings weights to engines."""

    async def connect(self) -> None: ...

    async def publish(self, version: int) -> Receipt:
        """Publish the trainer's present weights as `version`.

        Raises:
            SyncError: if an engine's receipt or probe does not agree with the trainer.
        """
        ...

    async def close(self) -> None: ...
