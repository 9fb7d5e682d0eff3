"""The publisher seam: weights from the trainer to the engines, with a receipt for each version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from whet.types import Receipt


class SyncError(RuntimeError):
    """An engine does not hold what the trainer holds. No token is sampled under the new version."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that the engine was proven to hold."""

    receipt: Receipt
    probe_nats: float
    """How far the engine's log-probs of a fixed prompt, through its cached decode path, are from the trainer's at most."""


class Publisher(Protocol):
    """Brings weights to engines."""

    async def publish(self, version: int) -> Publication:
        """Publish the trainer's present weights as `version`.

        Raises:
            SyncError: if an engine's receipt or probe does not agree with the trainer.
            NonFinite: if the trainer's own weights no longer give finite log-probs.
        """
        ...
