"""A user's function as the reward of siblings together: `fn(trajectories, **options) -> list`, one score for each of them.

It is called as the reward of single trajectories is (`whet.reward.function`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from whet.config import Config, Reference, resolve, resolve_callable
from whet.config.hook import is_async
from whet.here import is_here
from whet.reward.base import GroupReward, RewardError, call_name, read_score
from whet.reward.function import AskFunction, awaiting, on_threads
from whet.reward.pool import WorkerPool
from whet.types import JSON, Rewards, Trajectory
from whet.types.json_codec import rewards_from_json, rewards_to_json, trajectory_from_json, trajectory_to_json

SCORE_GROUP = "whet.reward.group:score"


class GroupRewardConfig(Config):
    """A reward that scores the siblings of a task together."""

    name: Reference
    """Import reference to a function `(trajectories, **options) -> list`: one score for each of those that ended well
    (docs/extending.md)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def group_reward(config: GroupRewardConfig, pool: WorkerPool, timeout_s: float, score_key: str | None = None) -> GroupReward:
    """The reward that a table names. Takes over the pool.

    Raises:
        ValueError: it is no function that takes (trajectories, **options).
    """
    function = resolve_callable(config.name, kind="reward.group", given=["trajectories"], options=config.options)
    if is_async(function):
        return AsyncGroupFunction(config, score_key, awaiting(function, timeout_s))
    if is_here(config.name):
        return AsyncGroupFunction(config, score_key, on_threads(function, timeout_s, pool.num_workers))
    return SyncGroupFunction(config, pool, score_key)


class SyncGroupFunction:
    """A plain function, called in a worker under the pool's deadline."""

    def __init__(self, config: GroupRewardConfig, pool: WorkerPool, score_key: str | None) -> None:
        self._config, self._pool, self._score_key = config, pool, score_key

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[Rewards]:
        what = _what(self._config, trajectories)
        arguments = {
            "reference": self._config.name,
            "options": self._config.options,
            "trajectories": [trajectory_to_json(trajectory, bulky=False) for trajectory in trajectories],
            "score_key": self._score_key,
        }
        result = await self._pool.call(SCORE_GROUP, arguments, what)
        if "invalid" in result:
            raise RewardError(f"{what}: {result['invalid']}")
        found = [rewards_from_json(each) for each in result["rewards"]]
        return [_named(self._config, rewards, t) for rewards, t in zip(found, trajectories, strict=True)]

    def close(self) -> None:
        self._pool.close()


class AsyncGroupFunction:
    """A function that is called in this process."""

    def __init__(self, config: GroupRewardConfig, score_key: str | None, ask: AskFunction) -> None:
        self._config, self._score_key, self._ask = config, score_key, ask

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[Rewards]:
        what = _what(self._config, trajectories)
        value = await self._ask(what, list(trajectories), **self._config.options)
        try:
            found = read_scores(value, len(trajectories), self._score_key)
        except ValueError as error:
            raise RewardError(f"{what}: {error}") from None
        return [_named(self._config, rewards, t) for rewards, t in zip(found, trajectories, strict=True)]

    def close(self) -> None:
        """Nothing to release."""


def score(reference: str, options: Mapping[str, Any], trajectories: JSON, score_key: str | None) -> JSON:
    """The worker's side of `SyncGroupFunction`."""
    value = resolve(reference, kind="reward.group")([trajectory_from_json(each) for each in trajectories], **options)
    try:
        return {"rewards": [rewards_to_json(each) for each in read_scores(value, len(trajectories), score_key)]}
    except ValueError as error:
        return {"invalid": str(error)}


def read_scores(value: object, num: int, score_key: str | None = None) -> list[Rewards]:
    """Return value of a function of siblings, as one score for each of `num`. Raises ValueError for
    anything else."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"it returned a {type(value).__name__}; return a list with one score for each trajectory")
    if len(value) != num:
        raise ValueError(f"it returned {len(value)} scores for {num} trajectories; return one for each, in their order")
    found: list[Rewards] = []
    for i, each in enumerate(value):
        try:
            found.append(read_score(each, score_key))
        except ValueError as error:
            raise ValueError(f"of trajectory {i}: {error}") from None
    return found


def _named(config: GroupRewardConfig, rewards: Rewards, trajectory: Trajectory) -> Rewards:
    """The rewards with their parts added to the earlier components of the trajectory; a single number
    gets the function's name."""
    parts = rewards.components or {config.name.rpartition(":")[2]: rewards.total}
    before = {} if trajectory.rewards is None else trajectory.rewards.components
    return replace(rewards, components={**before, **parts})


def _what(config: GroupRewardConfig, trajectories: Sequence[Trajectory]) -> str:
    return call_name(f"of the group {config.name!r}", trajectories[0].task)
