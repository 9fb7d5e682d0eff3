r"""The reward `dispatch`: each row says by which reward it is scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from whet.config import Config
from whet.reward.base import Reward, bad_row
from whet.reward.published.hendrycks import last_box
from whet.types import Rewards, Task, Trajectory

BOXED = "boxed_"
"""Before a type: what the reply's last box holds is scored instead of the reply."""

TABLES: dict[str, dict[str, str]] = {
    "slime": {
        "math": "slime_math",
        "deepscaler": "deepscaler",
        "dapo": "slime_dapo",
        "f1": "f1",
        "gpqa": "gpqa",
        "ifbench": "ifeval",
        "random": "random",
    },
    "verl": {
        "openai/gsm8k": "verl_gsm8k",
        "lighteval/MATH": "hendrycks_math",
        "DigitalLearningGmbH/MATH-lighteval": "hendrycks_math",
        "HuggingFaceH4/MATH-500": "hendrycks_math",
        "math_dapo": "verl_math_dapo",
        "math": "verl_math_dapo",
        "math_dapo_reasoning": "verl_math_dapo",
        "aime*": "verl_math_dapo",
        "numina_*": "prime_math",
        "hiyouga/geometry3k": "geo3k",
        "searchR1_*": "search_em",
    },
}
"""Reward for each type of row. A type that ends in `*` matches all that begin with it."""


class Choice(Config):
    """One reward of a dispatch."""

    name: str
    """A built-in reward or an import reference to a function."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""


class DispatchOptions(Config):
    """Options of the reward `dispatch`."""

    key: str = "rm_type"
    """Metadata key of a row's type; for verl's data sets, `data_source`."""
    table: Literal["slime", "verl", "none"] = "slime"
    """Types known from the start: those of slime's `rm_type`, or verl's data sources."""
    rewards: dict[str, Choice] = Field(default_factory=dict)
    """Further types, or others for the same ones: `rewards.remote_rm = { name = "remote", options = { url = ... } }`."""
    default: str | None = None
    """Type of the rows that name none."""

    def choices(self) -> dict[str, Choice]:
        """Every type with its reward."""
        known = TABLES.get(self.table, {})
        return {**{kind: Choice(name=name) for kind, name in known.items()}, **self.rewards}


class DispatchReward:
    r"""Scores a row by the reward that `metadata[key]` names; `boxed_` before the type scores what the last `\boxed{}` holds.

    The rule of slime's per-row `rm_type` and of verl's choice by data source. A row without a type, or with an unknown one, is a
    `LabelError`.
    """

    def __init__(self, options: DispatchOptions, build: Callable[[str, Mapping[str, Any]], Reward]) -> None:
        self._options = options
        self._rewards = {kind: build(choice.name, choice.options) for kind, choice in options.choices().items()}

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        kind = kind_of(trajectory.task, self._options)
        reward = self._rewards[row_reward(trajectory.task, kind, self._rewards, self._options.key)]
        if kind.startswith(BOXED):
            trajectory = _with_response(trajectory, last_box(trajectory.response) or "")
        return await reward(trajectory)

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.close()


def kind_of(task: Task, options: DispatchOptions) -> str:
    """The type that a row names. Raises LabelError if it names none and there is no default."""
    kind = task.metadata.get(options.key) or options.default or ""
    if not isinstance(kind, str) or not kind.strip():
        raise bad_row(task, f"names no type in metadata.{options.key}, and the reward dispatch has no default")
    return kind.strip()


def row_reward(task: Task, kind: str, known: Iterable[str], key: str) -> str:
    """Which of the known types a row's type is. Raises LabelError if it is none."""
    kind, known = kind.removeprefix(BOXED), list(known)
    if kind in known:
        return kind
    for each in known:
        if each.endswith("*") and kind.startswith(each[:-1]):
            return each
    raise bad_row(task, f"has the type {kind!r} (metadata.{key}); known are {', '.join(known)}")


def _with_response(trajectory: Trajectory, response: str) -> Trajectory:
    if not trajectory.turns:
        return trajectory
    last = trajectory.turns[-1]
    turn = dataclasses.replace(last, message=dataclasses.replace(last.message, content=response))
    return dataclasses.replace(trajectory, turns=(*trajectory.turns[:-1], turn))
