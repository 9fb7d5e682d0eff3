"""From the `[reward]` table to a live reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from pydantic import Field, model_validator

from whet.config import Config, resolve_callable, validated
from whet.config.errors import nearest
from whet.here import is_here
from whet.reward.base import GroupReward, Reward, RewardError, TextReward
from whet.reward.chance import RandomOptions, RandomReward
from whet.reward.dispatch import DispatchOptions, DispatchReward
from whet.reward.environment import EnvironmentOptions, EnvironmentReward
from whet.reward.exact import ExactOptions, ExactReward
from whet.reward.function import SCORE, function_reward
from whet.reward.group import SCORE_GROUP, GroupRewardConfig, group_reward
from whet.reward.math.equality import SETTLE
from whet.reward.math.math import MathOptions, MathReward
from whet.reward.math.values import ZERO
from whet.reward.model import ModelRewardOptions, ScorerOf
from whet.reward.pool import WorkerPool
from whet.reward.published.answers import F1Options, SearchOptions, score_f1, score_search
from whet.reward.published.boxed_math import BoxedMathOptions, BoxedReward, Geo3kOptions, deepscaler, geo3k, slime_math
from whet.reward.published.dapo import DapoOptions, OverlongOptions, OverlongPenalty, VerlDapoOptions, slime_dapo, verl_math_dapo
from whet.reward.published.gpqa import GpqaOptions, score_gpqa
from whet.reward.published.gsm8k import Gsm8kOptions, score_gsm8k
from whet.reward.published.hendrycks import HendrycksOptions, score_hendrycks
from whet.reward.published.ifeval import IfevalOptions, score_ifeval
from whet.reward.published.prime_math import CLOSE, PrimeMathOptions, PrimeMathReward
from whet.reward.published.verified import VERIFY, MathVerifyOptions, MathVerifyReward
from whet.reward.reasoning_gym import SCORE_REASONING, ReasoningGymOptions
from whet.reward.remote import RemoteOptions, RemoteReward
from whet.reward.roles import RolesOptions, RolesReward
from whet.reward.rubric import RubricOptions, RubricReward
from whet.runfolder.machine import usable_cores
from whet.types import Rewards, Task, Trajectory

Options = TypeVar("Options", bound=Config)
MAX_WORKERS = 8
"""Worker processes, where the settings name no number."""


class ComponentConfig(Config):
    """One named part of a reward."""

    name: str
    """A built-in (docs/rewards.md lists them) or an import reference to a function (`module:function`, `file.py:function`)."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward."""


class RewardChoice(Config):
    """Scoring of trajectories: by one reward (`name`), or by a weighted sum of several (`components`);
    then, or instead, siblings together (`group`)."""

    name: str | None = None
    """A built-in (docs/rewards.md lists them) or an import reference to a function (`module:function`, `file.py:function`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward `name`."""
    components: dict[str, ComponentConfig] = Field(default_factory=dict)
    """Several rewards by a name of your choice; the total is their weighted sum."""
    group: GroupRewardConfig | None = None
    """A reward of all siblings of a task together, computed after each has ended and was scored by
    itself; it replaces their rewards. If it fails, all siblings have failed, and they are not played
    again (control.retries)."""
    score_key: str | None = None
    """Key of the reward if a function returns a mapping; its other numbers are components. Unset:
    `total`, or the sum."""
    timeout_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds for each call, counted from its start in a worker, and for each request of a reward that
    asks a server."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.name is not None and self.components:
            raise ValueError(
                f"reward.name = {self.name!r} and reward.components ({', '.join(self.components)}) are both set; "
                "move the name into components, or drop one"
            )
        if not self.scores_each and self.group is None:
            raise ValueError(f'no reward is set; write name = "math" (or {_choices()}), or components')
        if self.name is None and self.options:
            raise ValueError("reward.options belongs to reward.name; give each of reward.components, and reward.group, its own options")
        return self

    @property
    def scores_each(self) -> bool:
        """True if trajectories are scored one by one."""
        return self.name is not None or bool(self.components)


class RewardConfig(RewardChoice):
    """Scoring of trajectories, and the processes that do it."""

    workers: int | None = Field(default=None, ge=1)
    """Processes that run plain functions and symbolic comparisons. Unset: one for each core, up to 8."""
    worker_memory_mb: int = Field(default=2048, ge=0)
    """Address space of each worker, on Linux; 0: no limit. A function that imports torch needs more."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that workers get, such as the key of a service that a function asks. They get none of the trainer's
    but those of paths, languages and numerical libraries."""

    @property
    def num_workers(self) -> int:
        """Number of worker processes, at most."""
        return self.workers or min(usable_cores(), MAX_WORKERS)


@dataclass(frozen=True, slots=True)
class Means:
    """Resources that a reward may be built with."""

    pool: WorkerPool
    timeout_s: float
    policy: Path | None
    """Folder of the model whose tokens the trajectories hold; None: unknown."""
    scorer_of: ScorerOf
    """Returns the scorer of a reward with a model; None: the reward loads its own model."""
    score_key: str | None
    """Entry of a mapping from a user's function that is the reward."""


@dataclass(frozen=True, slots=True)
class BuiltIn(Generic[Options]):
    """A reward that comes with whet."""

    options: type[Options]
    make: Callable[[Options, Means], Reward]
    preload: tuple[str, ...] = ()
    """Modules that a worker imports for the reward before its first deadline starts."""


def _text(options: type[Options], rule: Callable[[Task, str, Options], Rewards]) -> BuiltIn[Options]:
    """A rule of the reply's text."""

    def make(chosen: Options, means: Means) -> Reward:
        return TextReward(lambda task, response: rule(task, response, chosen))

    return BuiltIn(options, make)


def _geo3k(options: Geo3kOptions, means: Means) -> Reward:
    return BoxedReward("geo3k", lambda task, response: geo3k(task, response, options), means.pool)


def _model(options: ModelRewardOptions, means: Means) -> Reward:
    from whet.reward.model_reward import ModelReward  # needs torch, which a worker does without

    return ModelReward(options, means.policy, means.scorer_of(options))


def _dispatch(options: DispatchOptions, means: Means) -> Reward:
    return DispatchReward(options, lambda name, chosen: _build(ComponentConfig(name=name, options=dict(chosen)), means))


def _reasoning_gym(options: ReasoningGymOptions, means: Means) -> Reward:
    if find_spec("reasoning_gym") is None:
        raise ValueError("the reward 'reasoning_gym' needs the package reasoning-gym: pip install reasoning-gym")
    return function_reward(SCORE_REASONING, {"tag": options.tag}, means.pool, means.timeout_s, None)


REWARDS: dict[str, BuiltIn[Any]] = {
    "math": BuiltIn(MathOptions, lambda options, means: MathReward(options, means.pool), (SETTLE,)),
    "exact": BuiltIn(ExactOptions, lambda options, means: ExactReward(options)),
    "f1": _text(F1Options, score_f1),
    "search_em": _text(SearchOptions, score_search),
    "gpqa": _text(GpqaOptions, score_gpqa),
    "ifeval": _text(IfevalOptions, score_ifeval),
    "verl_gsm8k": _text(Gsm8kOptions, score_gsm8k),
    "hendrycks_math": _text(HendrycksOptions, score_hendrycks),
    "slime_dapo": _text(DapoOptions, slime_dapo),
    "verl_math_dapo": _text(VerlDapoOptions, verl_math_dapo),
    "slime_math": BuiltIn(BoxedMathOptions, lambda options, means: BoxedReward("slime_math", slime_math, means.pool), (ZERO,)),
    "deepscaler": BuiltIn(BoxedMathOptions, lambda options, means: BoxedReward("deepscaler", deepscaler, means.pool), (ZERO,)),
    "geo3k": BuiltIn(Geo3kOptions, _geo3k, (ZERO,)),
    "math_verify": BuiltIn(MathVerifyOptions, lambda options, means: MathVerifyReward(options, means.pool), (VERIFY,)),
    "prime_math": BuiltIn(PrimeMathOptions, lambda options, means: PrimeMathReward(options, means.pool), (ZERO, CLOSE)),
    "overlong": BuiltIn(OverlongOptions, lambda options, means: OverlongPenalty(options)),
    "environment": BuiltIn(EnvironmentOptions, lambda options, means: EnvironmentReward(options)),
    "reasoning_gym": BuiltIn(ReasoningGymOptions, _reasoning_gym, (SCORE, SCORE_REASONING)),
    "roles": BuiltIn(RolesOptions, lambda options, means: RolesReward()),
    "random": BuiltIn(RandomOptions, lambda options, means: RandomReward(options)),
    "model": BuiltIn(ModelRewardOptions, _model),
    "remote": BuiltIn(RemoteOptions, lambda options, means: RemoteReward(options, means.timeout_s)),
    "rubric": BuiltIn(RubricOptions, lambda options, means: RubricReward(options, means.timeout_s)),
    "dispatch": BuiltIn(DispatchOptions, _dispatch),
}


def options_of(name: str, options: Mapping[str, Any]) -> Any:
    """The options of the built-in reward `name`, in the type that its entry of `REWARDS` gives.

    Raises:
        ConfigError: for options that it does not take.
    """
    return validated(REWARDS[name].options, options, f"the options of the reward {name!r}")


def build_reward(config: RewardConfig, policy: Path | None = None, scorer_of: ScorerOf = lambda _: None) -> Reward:
    """The reward of single trajectories that a configuration describes. Its worker processes start with
    the first call that needs one.

    Args:
        config: the `[reward]` table.
        policy: folder of the model whose tokens the trajectories hold; None: unknown.
        scorer_of: returns the scorer of a reward with a model; None: the reward loads its own model.

    Raises:
        ValueError: an unknown name, a reference that does not resolve, options that the reward does not
            take, no reward model, no reward of single trajectories, or a variable of `environment` that
            is not set.
    """
    if not config.scores_each:
        raise ValueError("reward.group alone scores no trajectory by itself; set reward.name or reward.components")
    components = components_of(config)
    preload = list(dict.fromkeys(reference for part in components.values() for reference in _preload(part.name, part.options)))
    pool = WorkerPool(config.num_workers, config.timeout_s, config.worker_memory_mb, preload, config.environment)
    try:
        means = Means(pool, config.timeout_s, policy, scorer_of, config.score_key)
        parts = {name: (_build(part, means), part.weight) for name, part in components.items()}
    except BaseException:
        pool.close()
        raise
    return WeightedReward(parts, pool, single=config.name is not None)


def build_group_reward(config: RewardConfig) -> GroupReward | None:
    """The reward of siblings together, with its own workers; None: the configuration has no group
    reward.

    Raises:
        ValueError: a reference that does not resolve, options that the function does not take, or a variable that is not set.
    """
    if config.group is None:
        return None
    preload = [] if is_here(config.group.name) else [SCORE_GROUP, config.group.name]
    pool = WorkerPool(config.num_workers, config.timeout_s, config.worker_memory_mb, preload, config.environment)
    return group_reward(config.group, pool, config.timeout_s, config.score_key)


def reward_models(config: RewardConfig) -> Iterator[ModelRewardOptions]:
    """The reward models that a configuration asks for."""
    for part in components_of(config).values():
        if part.name == "model":
            yield options_of(part.name, part.options)
        elif part.name == "dispatch":
            choices = options_of(part.name, part.options).choices().values()
            yield from (options_of(choice.name, choice.options) for choice in choices if choice.name == "model")


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
        return Rewards(total, self._components(scores), _details(scores), self._token_rewards(scores), self._by_role(scores))

    def _by_role(self, scores: Mapping[str, Rewards]) -> dict[str, float]:
        """The weighted sum for each role that one of them scores; a reward without roles counts for all alike."""
        roles = dict.fromkeys(role for score in scores.values() for role in score.by_role)
        parts = self._parts.items()
        return {role: math.fsum(weight * scores[name].of(role) for name, (_, weight) in parts) for role in roles}

    def _token_rewards(self, scores: Mapping[str, Rewards]) -> tuple[tuple[float, ...], ...] | None:
        """The weighted sum of those that there are."""
        found = [(self._parts[name][1], rows) for name, score in scores.items() if (rows := score.token_rewards) is not None]
        if len({tuple(map(len, rows)) for _, rows in found}) > 1:
            raise RewardError("the token_rewards of several components have rows of different lengths: give each sampled token one")
        turns = zip(*(rows for _, rows in found), strict=True)
        summed = (zip(*turn, strict=True) for turn in turns)
        weights = [weight for weight, _ in found]

        def total(token: tuple[float, ...]) -> float:
            return math.fsum(weight * x for weight, x in zip(weights, token, strict=True))

        return tuple(tuple(map(total, turn)) for turn in summed) if found else None

    def close(self) -> None:
        """End the worker processes; calls in flight fail."""
        with ExitStack() as ends:  # one that fails to close keeps no other from it
            ends.callback(self._pool.close)
            for reward, _ in self._parts.values():
                ends.callback(reward.close)

    def _components(self, scores: Mapping[str, Rewards]) -> dict[str, float]:
        components: dict[str, float] = {}
        for name, score in scores.items():
            if self._single and score.components:
                return dict(score.components)
            components[name] = score.total
            components.update({f"{name}/{part}": value for part, value in score.components.items()})
        return components


def components_of(config: RewardConfig | RewardChoice) -> dict[str, ComponentConfig]:
    """Its parts by their names; a single reward goes by its own."""
    if config.name is None:
        return config.components
    return {_short(config.name): ComponentConfig(name=config.name, options=config.options)}


def check_functions(config: RewardConfig | RewardChoice) -> None:
    """See that the rewards are there, and that functions of the user take a trajectory and their options.

    Raises:
        ValueError: naming the reward.
    """
    for component in components_of(config).values():
        if component.name in REWARDS:
            options_of(component.name, component.options)
        elif ":" not in component.name:
            raise ValueError(f"there is no reward {component.name!r}{_near(component.name)}; there are {_choices()}")
        else:
            resolve_callable(component.name, kind="reward", given=["trajectory"], options=component.options)


def _near(name: str) -> str:
    if name.endswith(".py"):
        return f", which is a file: name a function in it, {name}:FUNCTION"
    near = nearest(name, REWARDS)
    return f"; did you mean {' or '.join(near)}" if near else ""


def _build(component: ComponentConfig, means: Means) -> Reward:
    if component.name in REWARDS:
        return REWARDS[component.name].make(options_of(component.name, component.options), means)
    if ":" not in component.name:
        raise ValueError(f"there is no reward {component.name!r}{_near(component.name)}; there are {_choices()}")
    return function_reward(component.name, component.options, means.pool, means.timeout_s, means.score_key)


def _preload(name: str, options: Mapping[str, Any]) -> list[str]:
    """Modules that a worker imports before its first deadline starts."""
    if name == "dispatch":
        choices = options_of(name, options).choices().values()
        return [reference for choice in choices for reference in _preload(choice.name, choice.options)]
    if name in REWARDS:
        return list(REWARDS[name].preload)
    return [SCORE, name] if ":" in name and not is_here(name) else []


def _short(name: str) -> str:
    return name.rpartition(":")[2]


def _choices() -> str:
    return ", ".join(repr(name) for name in REWARDS) + ' or an import reference "module:function"'


def _details(scores: Mapping[str, Rewards]) -> str:
    details = {name: score.detail for name, score in scores.items() if score.detail}
    if len(scores) == 1:
        return "".join(details.values())
    return "; ".join(f"{name}: {detail}" for name, detail in details.items())
