"""A user's function as a reward: `fn(trajectory, **options) -> float | dict[str, float] | Rewards`.

A plain function runs in a killable worker, which imports it again: it shares no state with the trainer,
and its own state lives as long as its worker. One that Python code gave as an object, and that cannot be
imported, runs on a thread. A coroutine function runs in the event loop, so it must not block.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from whet.config import place_of, resolve, resolve_callable
from whet.env.threads import CallTimeout, DaemonThreads
from whet.here import is_here
from whet.reward.base import Reward, RewardError, RewardTimeout, read_score
from whet.reward.pool import WorkerPool
from whet.types import JSON, Rewards, Trajectory
from whet.types.json_codec import rewards_from_json, rewards_to_json, trajectory_from_json, trajectory_to_json

SCORE = "whet.reward.function:score"


def function_reward(reference: str, options: Mapping[str, Any], pool: WorkerPool, timeout_s: float, score_key: str | None = None) -> Reward:
    """The reward that a reference names. Raises ValueError if it is no function that takes (trajectory, **options)."""
    function = resolve_callable(reference, kind="reward", given=["trajectory"], options=options)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return AsyncFunction(reference, options, score_key, awaiting(function, timeout_s))
    if is_here(reference):
        return AsyncFunction(reference, options, score_key, on_threads(function, timeout_s, pool.num_workers))
    return SyncFunction(reference, options, pool, score_key)


AskFunction = Callable[..., Awaitable[Any]]
"""Calls a user's function: `ask(what, *given, **options)`, where `what` names the call in errors.

Raises:
    RewardTimeout: the function took too long.
    RewardError: it raised.
"""


def awaiting(function: Callable[..., Awaitable[Any]], timeout_s: float) -> AskFunction:
    """Calls of a coroutine function, which are cancelled after `timeout_s`."""

    async def ask(what: str, *given: Any, **options: Any) -> Any:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await function(*given, **options)
        except Exception as error:  # a user's function may raise anything; it becomes one typed error here
            raise _failed(error, what, timeout_s, late=limit.expired() and isinstance(error, TimeoutError)) from error

    return ask


def on_threads(function: Callable[..., Any], timeout_s: float, num_threads: int) -> AskFunction:
    """Calls of a plain function, at most `num_threads` at a time. The limit counts from the start of a call; one that takes longer runs on,
    and its result is dropped.
    """
    threads = DaemonThreads(num_threads)

    async def ask(what: str, *given: Any, **options: Any) -> Any:
        try:
            return await threads.run(lambda: function(*given, **options), timeout_s)
        except Exception as error:  # as above
            raise _failed(error, what, timeout_s, late=isinstance(error, CallTimeout)) from error

    return ask


def _failed(error: Exception, what: str, timeout_s: float, *, late: bool) -> RewardError:
    if late:
        return RewardTimeout(f"{what} took longer than {timeout_s:g} s (reward.timeout_s)")
    return RewardError(f"{what}: {type(error).__name__}: {error}{place_of(error)}")


class SyncFunction:
    """A plain function, called in a worker under the pool's deadline."""

    def __init__(self, reference: str, options: Mapping[str, Any], pool: WorkerPool, score_key: str | None) -> None:
        self._reference, self._options, self._pool, self._score_key = reference, dict(options), pool, score_key

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        what = _what(self._reference, trajectory)
        arguments = {
            "reference": self._reference,
            "options": self._options,
            "trajectory": trajectory_to_json(trajectory, bulky=False),
            "score_key": self._score_key,
        }
        result = await self._pool.call(SCORE, arguments, what)
        if "invalid" in result:
            raise RewardError(f"{what}: {result['invalid']}")
        return rewards_from_json(result["rewards"])

    def close(self) -> None:
        """Nothing to release: the pool belongs to its maker."""


class AsyncFunction:
    """A function that is called in this process."""

    def __init__(self, reference: str, options: Mapping[str, Any], score_key: str | None, ask: AskFunction) -> None:
        self._reference, self._options, self._score_key, self._ask = reference, dict(options), score_key, ask

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        what = _what(self._reference, trajectory)
        value = await self._ask(what, trajectory, **self._options)
        try:
            return read_score(value, self._score_key)
        except ValueError as error:
            raise RewardError(f"{what}: {error}") from None

    def close(self) -> None:
        """Nothing to release."""


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
