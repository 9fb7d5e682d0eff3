"""Proof that an engine held the weights of a version when it sampled under it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from whet.types.records import JSON


@dataclass(frozen=True, slots=True)
class Proof:
    """Level of proof that an engine, with each of its members, held the trainer's weights of a version before it sampled a token.

    Example: `Proof()` is no proof: nothing was compared.
    """

    arrival: bool = False
    """True if the digest of every tensor that arrived was compared with the trainer's."""
    memory_share: float = 0.0
    """Share of the engine's parameters, by their number, whose bytes in its own memory were compared with the trainer's."""
    probe_nats: float | None = None
    """Bound on the difference between the engine's log-probs of a fixed prompt and the trainer's; None: no prompt was scored."""

    def words(self) -> str:
        """A short phrase: `arrival compared, memory compared, probe within 3e-07 nats`."""
        percent = math.floor(1000 * self.memory_share) / 10  # 100% is all of it
        parts = ["arrival compared"] if self.arrival else []
        if self.memory_share > 0:
            parts.append("memory compared" if self.memory_share >= 1 else f"{percent:g}% of memory compared")
        if self.probe_nats is not None:
            parts.append(f"probe within {self.probe_nats:.2g} nats")
        return ", ".join(parts) or "no proof"

    def or_weaker(self, other: Proof) -> Proof:
        """The level that both reach, for two proofs of one version against the trainer."""
        probes = [each for each in (self.probe_nats, other.probe_nats) if each is not None]
        share = min(self.memory_share, other.memory_share)
        return Proof(self.arrival and other.arrival, share, max(probes) if len(probes) == 2 else None)

    def through(self, later: Proof | None) -> Proof:
        """The level that this proof and that of later members reach, which were compared with earlier ones; None: there are none."""
        if later is None:
            return self
        weaker = self.or_weaker(later)
        if self.probe_nats is None or later.probe_nats is None:
            return weaker
        return Proof(weaker.arrival, weaker.memory_share, self.probe_nats + later.probe_nats)

    def to_json(self) -> dict[str, JSON]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: JSON) -> Proof:
        """From what `to_json` gave."""
        return cls(**state)
