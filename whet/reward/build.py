"""From the `[reward]` table to a live reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, model_validator

from whet.config import Config
from whet.reward.base import Reward
from whet.reward.exact import ExactOptions, ExactReward
from whet.reward.function import SCORE, function_reward
from whet.reward.math import COMPARE, MathOptions, MathReward
from whet.reward.pool import WorkerPool
from whet.types import Rewards, Trajectory


class ComponentConfig(Config):
    """One named part of a reward."""

    name: str
    """A built-in (`math`, `exact`) or an import reference to a function (`module:function`, `file.py:function`)."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class RewardConfig(Config):
    """How trajectories are scored: by one reward (`name`), or by a weighted sum of several (`components`)."""

    name: str | None = None
    """A built-in (`math`, `exact`) or an import reference to a function (`module:function`, `file.py:function`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward `name`."""
    components: dict[str, ComponentConfig] = Field(default_factory=dict)
    """Several rewards by a name of your choice; the total is their weighted sum."""
    timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """For each call, from when a worker takes it."""
    workers: int = Field(default=1, ge=1)
    """Processes that run plain functions and symbolic comparisons."""
    worker_memory_mb: int = Field(default=2048, ge=0)
    """Address space of each worker, on Linux; 0: no limit. A function that imports torch needs more."""

    @model_validator(mode="after")
    def _one_form(self) -> RewardConfig:
        if self.name is not None and self.components:
            raise ValueError(
                f"reward.name = {self.name!r} and reward.components ({', '.join(self.components)}) are both set; "
                "move the name into components, or drop one"
            )
        if self.name is None and not self.components:
            raise ValueError(f'no reward is set; write name = "math" (or {_choices()}), or components')
        if self.components and self.options:
            raise ValueError("reward.options belongs to reward.name; give each of reward.components its own options")
        return self


def _build_math(options: Mapping[str, Any], pool: WorkerPool) -> Reward:
    return MathReward(MathOptions.model_validate(options), pool)


def _build_exact(options: Mapping[str, Any], pool: WorkerPool) -> Reward:
    return ExactReward(ExactOptions.model_validate(options))


REWARDS: dict[str, Callable[[Mapping[str, Any], WorkerPool], Reward]] = {"math": _build_math, "exact": _build_exact}


def build_reward(config: RewardConfig) -> Reward:
    """The reward that a configuration asks for. Its worker processes start with the first call that needs one.

    Raises ValueError for an unknown name, a reference that does not resolve, and options the reward does not take.
    """
    components = config.components
    if config.name is not None:
        components = {_short(config.name): ComponentConfig(name=config.name, options=config.options)}
    pool = WorkerPool(config.workers, config.timeout_s, config.worker_memory_mb, _preload(components))
    try:
        parts = {name: (_build(part, pool, config.timeout_s), part.weight) for name, part in components.items()}
    except BaseException:
        pool.close()
        raise
    return WeightedReward(parts, pool, single=config.name is not None)


class WeightedReward:
    """The weighted sum of named rewards, which run concurrently.

    `components` keeps each one's unweighted score by its name, and the parts of its own that it names as `name/part`.
    With a single reward, parts that a function names itself stand alone, under its own names.
    """

    def __init__(self, parts: Mapping[str, tuple[Reward, float]], pool: WorkerPool, single: bool = False) -> None:
        """Takes over the pool."""
        self._parts, self._pool, self._single = dict(parts), pool, single

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        calls = (reward(trajectory) for reward, _ in self._parts.values())
        results = await asyncio.gather(*calls, return_exceptions=True)
        scores: dict[str, Rewards] = {}
        for name, result in zip(self._parts, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            scores[name] = result
        total = math.fsum(weight * scores[name].total for name, (_, weight) in self._parts.items())
        return Rewards(total, self._components(scores), _details(scores))

    def close(self) -> None:
        """End the worker processes; calls in flight fail."""
        for reward, _ in self._parts.values():
            reward.close()
        self._pool.close()

    def _components(self, scores: Mapping[str, Rewards]) -> dict[str, float]:
        components: dict[str, float] = {}
        for name, score in scores.items():
            if self._single and score.components:
                return dict(score.components)
            components[name] = score.total
            components.update({f"{name}/{part}": value for part, value in score.components.items()})
        return components


def _build(component: ComponentConfig, pool: WorkerPool, timeout_s: float) -> Reward:
    if component.name in REWARDS:
        return REWARDS[component.name](component.options, pool)
    if ":" not in component.name:
        raise ValueError(f"there is no reward {component.name!r}; choose {_choices()}")
    return function_reward(component.name, component.options, pool, timeout_s)


def _preload(components: Mapping[str, ComponentConfig]) -> list[str]:
    """What a worker imports before its first deadline starts."""
    names = [component.name for component in components.values()]
    references = [name for name in names if name not in REWARDS and ":" in name]
    return [*([COMPARE] if "math" in names else []), *([SCORE, *references] if references else [])]


def _short(name: str) -> str:
    return name.rpartition(":")[2]


def _choices() -> str:
    return ", ".join(repr(name) for name in REWARDS) + ' or an import reference "module:function"'


def _details(scores: Mapping[str, Rewards]) -> str:
    details = {name: score.detail for name, score in scores.items() if score.detail}
    if len(scores) == 1:
        return "".join(details.values())
    return "; ".join(f"{name}: {detail}" for name, detail in details.items())
