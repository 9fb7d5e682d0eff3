"""The reward `environment`: what the environment itself gave, turn by turn or at the end."""

from __future__ import annotations

import math
from typing import Literal

from whet.config import Config
from whet.reward.base import RewardError, call_name
from whet.types import Outcome, Rewards, Trajectory


class EnvironmentOptions(Config):
    """Options of the reward `environment`."""

    how: Literal["sum", "last"] = "sum"
    """sum: the rewards of all turns, added up; last: the reward of the last turn that has one."""
    per_turn: bool = False
    """Give each turn's reward to the last token that the turn sampled, in place of one total for the trajectory. For estimators with
    time steps (ppo)."""


class EnvironmentReward:
    """Sum, or the last, of the rewards that the environment gave for turns (`Step.reward`).

    The parts are the numbers that the environment itself reported (`TurnNote.metrics`), the last of each name. A trajectory that the
    run's limits cut before it had any reward scores 0; one that ended well without any is a `RewardError`.
    """

    def __init__(self, options: EnvironmentOptions) -> None:
        if options.per_turn and options.how == "last":
            raise ValueError("reward.options: per_turn gives every turn its own reward, so how = \"last\" has no meaning with it")
        self._options = options

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        given = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        if not given and trajectory.outcome is not Outcome.TRUNCATED:
            where = call_name("environment", trajectory.task)
            raise RewardError(f"{where}: the environment gave no reward; choose a reward.name that scores its trajectories")
        if not all(map(math.isfinite, given)):
            raise RewardError(f"{call_name('environment', trajectory.task)}: the environment gave {given}; rewards must be finite")
        parts = {name: float(x) for turn in trajectory.turns for note in turn.notes if not note.tool for name, x in note.metrics.items()}
        if self._options.per_turn:
            rows = tuple((*(0.0 for _ in turn.tokens[1:]), turn.reward or 0.0) if turn.tokens else () for turn in trajectory.turns)
            return Rewards(0.0, parts, token_rewards=rows)
        total = math.fsum(given) if self._options.how == "sum" else (given[-1] if given else 0.0)
        return Rewards(total, {"environment": total, **parts} if parts else {})

    def close(self) -> None:
        """Nothing to release."""
