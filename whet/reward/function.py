"""A user's function as a reward: `fn(trajectory, **options) -> float | dict[str, float] | Rewards`.

A plain function runs in a killable worker, which imports it again: it shares no state with the trainer,
and its own state lives as long as its worker. A coroutine function runs in the event loop, so it must
not block.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

from whet.config import place_of, resolve, resolve_callable
from whet.reward.base import Reward, RewardError, RewardTimeout, read_score
from whet.reward.pool import WorkerPool
from whet.types import JSON, Rewards, Trajectory
from whet.types.json_codec import rewards_from_json, rewards_to_json, trajectory_from_json, trajectory_to_json

SCORE = "whet.reward.function:score"


def function_reward(reference: str, options: Mapping[str, Any], pool: WorkerPool, timeout_s: float, score_key: str | None = None) -> Reward:
    """The reward that a reference names. Raises ValueError if it is no function that takes (trajectory, **options)."""
    function = resolve_callable(reference, kind="reward", given=["trajectory"], options=options)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return AsyncFunction(reference, options, timeout_s, score_key)
    return SyncFunction(reference, options, pool, score_key)


class SyncFunction:
    """A plain function, called in a worker under the pool's deadline."""

    def __init__(self, reference: str, options: Mapping[str, Any], pool: WorkerPool, score_key: str | None) -> None:
        self._reference, self._options, self._pool, self._score_key = reference, dict(options), pool, score_key

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        what = _what(self._reference, trajectory)
        arguments = {
            "reference": self._reference,
            "options": self._options,
            "trajectory": trajectory_to_json(trajectory, nuclei=False),
            "score_key": self._score_key,
        }
        result = await self._pool.call(SCORE, arguments, what)
        if "invalid" in result:
            raise RewardError(f"{what}: {result['invalid']}")
        return rewards_from_json(result["rewards"])

    def close(self) -> None:
        """Nothing to release: the pool belongs to its maker."""


class AsyncFunction:
    """A coroutine function, awaited in the event loop and cancelled at its deadline."""

    def __init__(self, reference: str, options: Mapping[str, Any], timeout_s: float, score_key: str | None) -> None:
        self._reference, self._options, self._timeout_s, self._score_key = reference, dict(options), timeout_s, score_key
        self._function = resolve(reference, kind="reward")

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        what = _what(self._reference, trajectory)
        value = await awaited(self._function(trajectory, **self._options), self._timeout_s, what)
        try:
            return read_score(value, self._score_key)
        except ValueError as error:
            raise RewardError(f"{what}: {error}") from None

    def close(self) -> None:
        """Nothing to release."""


async def awaited(call: Awaitable[Any], timeout_s: float, what: str) -> Any:
    """The result of a user's coroutine; `what` names it in errors.

    Raises:
        RewardTimeout: it took longer than `timeout_s`.
        RewardError: it raised.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except Exception as error:  # a user's function may raise anything; it becomes one typed error here
        if limit.expired() and isinstance(error, TimeoutError):
            raise RewardTimeout(f"{what} took longer than {timeout_s:g} s (reward.timeout_s)") from error
        raise RewardError(f"{what}: {type(error).__name__}: {error}{place_of(error)}") from error


def score(reference: str, options: Mapping[str, Any], trajectory: JSON, score_key: str | None) -> JSON:
    """The worker's side of `SyncFunction`."""
    value = resolve(reference, kind="reward")(trajectory_from_json(trajectory), **options)
    try:
        return {"rewards": rewards_to_json(read_score(value, score_key))}
    except ValueError as error:
        return {"invalid": str(error)}


def _what(reference: str, trajectory: Trajectory) -> str:
    task = trajectory.task
    return f"reward {reference!r} on task {task.id!r}" + (f" ({task.origin})" if task.origin else "")
