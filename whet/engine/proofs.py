"""Table of the proofs of a run's versions."""

from __future__ import annotations

from collections.abc import Mapping

from whet.types import Proof

NUM_VERSIONS = 1024
"""Newest versions whose proof is kept."""


class ProofTable:
    """Proof of each of the newest versions of a run. A version that is published again has the weaker of its proofs.

    Args:
        proofs: proofs by version.
    """

    def __init__(self, proofs: Mapping[int, Proof] | None = None) -> None:
        self._proofs = dict(proofs or {})

    def add(self, version: int, proof: Proof) -> None:
        """Take a version's proof."""
        before = self._proofs.get(version)
        self._proofs[version] = proof if before is None else before.or_weaker(proof)
        if len(self._proofs) > NUM_VERSIONS:
            del self._proofs[min(self._proofs)]

    def snapshot(self) -> dict[int, Proof]:
        """The proofs by version, in a dictionary of its own."""
        return dict(self._proofs)
