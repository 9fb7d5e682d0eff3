"""The reward seam: an async callable that scores a trajectory, or all siblings of a task together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Protocol

from whet.types import Rewards, Task, Trajectory
from whet.types.columns import Doubles


class RewardError(Exception):
    """A reward could not be computed: it raised, it crashed, or it returned something that is no score.

    Never turned into a 0: the rollout boundary records it as the trajectory's outcome.
    """


class RewardTimeout(RewardError):
    """A reward did not answer before its deadline."""


class LabelError(ValueError):
    """A task's label cannot be used by the reward that reads it: the data are wrong, not the answer."""


class Reward(Protocol):
    """Scores one trajectory. Raises `RewardError`, `RewardTimeout` or `LabelError`; may be called concurrently."""

    async def __call__(self, trajectory: Trajectory) -> Rewards: ...

    def close(self) -> None:
        """Release processes and files. A closed reward must not be called again."""
        ...


class GroupReward(Protocol):
    """Scores siblings together: those of one task that ended well, each with the rewards that it has by itself, if any. Raises as a
    `Reward`; may be called concurrently."""

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[Rewards]:
        """One for each, in their order."""
        ...

    def close(self) -> None: ...


class TextReward:
    """A rule that needs a task and the reply's text alone, and so little time that it runs where it is called."""

    def __init__(self, rule: Callable[[Task, str], Rewards]) -> None:
        self._rule = rule

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        return self._rule(trajectory.task, trajectory.response)

    def close(self) -> None:
        """Nothing to release."""


def label_of(task: Task, reward: str) -> str:
    """The task's label. Raises LabelError if it has none."""
    if task.label is None:
        raise bad_row(task, f"has no label; the reward {reward} needs one")
    return task.label


def call_name(reward: str, task: Task) -> str:
    """Name of a call in errors."""
    return f"reward {reward} on task {task.id!r}" + (f" ({task.origin})" if task.origin else "")


def bad_row(task: Task, reason: str) -> LabelError:
    """The error for a row that a reward cannot use: `reason` goes on after the task's name."""
    place = f" ({task.origin})" if task.origin else ""
    return LabelError(f"task {task.id!r}{place} {reason}")


def read_score(value: object, score_key: str | None = None) -> Rewards:
    """The return value of a user's function as `Rewards`: a number, named components, or `Rewards`
    itself.

    A mapping's "total" is the total; without one, the total is the sum of its components. With
    `score_key`, that entry of a mapping is the total, its other numbers are components, and entries
    that are no number are left out.

    Raises ValueError for anything else, and for numbers that are not finite.
    """
    if score_key is not None and isinstance(value, Mapping):
        if score_key not in value:
            raise ValueError(f"it returned {_shorten(list(value))}, without {score_key!r} (reward.score_key)")
        total = _number(value[score_key], f"the entry {score_key!r}")
        parts = {str(name): _number(part, f"component {name!r}") for name, part in value.items() if isinstance(part, Real)}
        return Rewards(total, parts)
    if isinstance(value, Rewards):
        components = {str(name): _number(part, f"component {name!r}") for name, part in value.components.items()}
        by_role = {str(name): _number(part, f"by_role[{name!r}]") for name, part in value.by_role.items()}
        return Rewards(_number(value.total, "the total"), components, str(value.detail), _rows(value.token_rewards), by_role)
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("it returned an empty mapping; name at least one component")
        otherwise = "; with reward.score_key naming the entry that is the reward, entries that are no numbers are left out"
        components = {str(name): _number(part, f"component {name!r}", otherwise) for name, part in value.items()}
        total = components.pop("total") if "total" in components else math.fsum(components.values())
        return Rewards(_number(total, "the total"), components)
    return Rewards(_number(value, "the reward"))


def place_token_rewards(trajectory: Trajectory, rewards: Rewards) -> tuple[Trajectory, Rewards]:
    """Put the rewards of single tokens into the turns that they are of.

    Raises:
        ValueError: if there is not one for each sampled token.
    """
    rows, turns = rewards.token_rewards, trajectory.turns
    if rows is None:
        return trajectory, rewards
    given, sampled = [len(row) for row in rows], [len(turn.tokens) for turn in turns]
    if given != sampled:
        raise ValueError(f"token_rewards has rows of {given} numbers, but the turns have {sampled} sampled tokens; give each token one")
    placed = tuple(replace(turn, token_rewards=Doubles(row)) for turn, row in zip(turns, rows, strict=True))
    return replace(trajectory, turns=placed), replace(rewards, token_rewards=None)


def _rows(value: object) -> tuple[tuple[float, ...], ...] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(row, Sequence) for row in value):
        raise ValueError(f"token_rewards is {_shorten(value)}; it must be one row of numbers for each turn")
    return tuple(tuple(_number(x, f"token_rewards[{i}][{k}]") for k, x in enumerate(row)) for i, row in enumerate(value))


def _number(value: object, what: str, otherwise: str = "") -> float:
    if not isinstance(value, Real):
        raise ValueError(f"{what} is {_shorten(value)} ({type(value).__name__}); return a float, a dict of floats, or Rewards{otherwise}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; it must be finite")
    return number


def _shorten(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
