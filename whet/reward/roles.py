"""The reward `roles`: in a game, each role's own score."""

from __future__ import annotations

from math import fsum

from whet.config import Config
from whet.reward.base import RewardError, call_name
from whet.types import Rewards, Trajectory


class RolesOptions(Config):
    """Options of the reward `roles`: none."""


class RolesReward:
    """The scores that a game gave to its roles (`Turn.reward` of each role's turns, added up). The total is their mean.

    A trajectory without a turn that has a role is a `RewardError`: its environment is no game.
    """

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        found: dict[str, list[float]] = {}
        for turn in trajectory.turns:
            if turn.role and turn.reward is not None:
                found.setdefault(turn.role, []).append(turn.reward)
        if not found:
            raise RewardError(f'{call_name("roles", trajectory.task)}: no role has a score; it goes with env.name = "game"')
        scores = {role: fsum(rewards) for role, rewards in found.items()}
        return Rewards(fsum(scores.values()) / len(scores), scores, by_role=scores)

    def close(self) -> None:
        """Nothing to release."""
