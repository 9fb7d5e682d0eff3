"""The reward `random`: 0 or 1 by chance. A control: what a run learns from it, it did not learn from its reward."""

from __future__ import annotations

import hashlib

from whet.config import Config
from whet.types import Rewards, Trajectory


class RandomOptions(Config):
    """Options of the reward `random`."""

    seed: int = 0
    """Another seed gives other rewards."""


class RandomReward:
    """0 or 1 with equal chance, the same for the same trajectory (its id) and seed."""

    def __init__(self, options: RandomOptions) -> None:
        self._seed = options.seed

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        digest = hashlib.sha256(f"{self._seed}/{trajectory.id}".encode("utf-8", "backslashreplace")).digest()
        return Rewards(float(digest[0] & 1))

    def close(self) -> None:
        """Nothing to release."""
