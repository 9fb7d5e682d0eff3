"""The publisher seam: weights from the trainer to the engines, with a receipt for each version."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from whet.observe.metrics import Max, Metrics, Total
from whet.types import Receipt, RunFailed


class SyncError(RunFailed):
    """An engine does not hold what the trainer holds. No token is sampled under the new version."""


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Where the seconds of a publication went. Parts overlap: engines may load while the trainer still gathers."""

    gather_s: float
    """The trainer put its tensors together, in the type that they travel in."""
    convert_s: float
    """Digests of what is sent; packing and compressing."""
    wire_s: float
    """Copying, writing or sending, as far as it held up the trainer."""
    load_s: float
    """The slowest engine took the weights over, and took digests."""
    prove_s: float
    """Digests of what the trainer holds compared with what the engines hold, and the probe on both sides."""
    pause_s: float
    """No token was sampled: all of the above, proof included."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that the engine was proven to hold."""

    receipt: Receipt
    probe_nats: float
    """How far the engine's log-probs of a fixed prompt, through its cached decode path, are from the trainer's at most."""
    times: SyncTimes

    def metrics(self) -> Metrics:
        """`sync/...`: seconds by part, bytes that left the trainer's process, the probe."""
        seconds: Metrics = {f"sync/{part}": Total(found) for part, found in asdict(self.times).items()}
        return {**seconds, "sync/bytes": Total(self.receipt.wire_bytes), "sync/probe_nats": Max(self.probe_nats)}


class Publisher(Protocol):
    """Brings weights to engines."""

    async def publish(self, version: int) -> Publication:
        """Publish the trainer's present weights as `version`.

        Raises:
            SyncError: if an engine's receipt or probe does not agree with the trainer.
            NonFinite: if the trainer's own weights no longer give finite log-probs.
        """
        ...
