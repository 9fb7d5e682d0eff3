"""Filters: why a finished group is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from whet.config import ConfigError, Hook
from whet.core.advantages import nothing_to_compare
from whet.rollout.control import ControlConfig, FilterConfig
from whet.rollout.filter_options import options_of, order_of
from whet.rollout.order import Order
from whet.rollout.samples import score_of
from whet.types import Group

Filter = Callable[[Group], str | None]
"""Why a group is dropped, in a word or two that are counted; None: it is kept."""


def zero_std(group: Group, component: str | None = None) -> str | None:
    """Drop a group whose valid trajectories all scored the same, or of which fewer than two are valid: it has no advantages. In a game
    that holds for every role."""
    scores = scores_of(group, component)
    if component is None and (roles := _roles_of(group)):
        verdicts = [nothing_to_compare(found) for found in roles]
        return _no_valid(scores) or (verdicts[0] if all(verdicts) else None)
    return _no_valid(scores) or nothing_to_compare(scores)


def all_right(group: Group, pass_reward: float, component: str | None = None) -> str | None:
    """Drop a group in which every valid trajectory is right, or none is valid."""
    scores = scores_of(group, component)
    return _no_valid(scores) or ("all_right" if min(scores) >= pass_reward else None)


def all_wrong(group: Group, pass_reward: float, component: str | None = None) -> str | None:
    """Drop a group in which no valid trajectory is right, or none is valid."""
    scores = scores_of(group, component)
    return _no_valid(scores) or ("all_wrong" if max(scores) < pass_reward else None)


def length(group: Group, min_tokens: int, max_tokens: int | None) -> str | None:
    """Drop a group with a valid trajectory of fewer or more sampled tokens."""
    lengths = [t.num_tokens_sampled for t in group.trajectories if t.outcome.valid]
    if min(lengths, default=min_tokens) < min_tokens:
        return "too_short"
    return "too_long" if max_tokens is not None and max(lengths, default=0) > max_tokens else None


FILTERS: dict[str, Callable[..., str | None]] = {"zero_std": zero_std, "all_right": all_right, "all_wrong": all_wrong, "length": length}


def scores_of(group: Group, component: str | None = None) -> list[float]:
    """Scores of the group's valid trajectories; with `component` that part of their rewards.

    Raises:
        ConfigError: a reward has no such part.
    """
    if component is None:
        return [score for t in group.trajectories if (score := score_of(t)) is not None]
    found = [t.rewards.components for t in group.trajectories if t.outcome.valid and t.rewards is not None]
    lacking = next((parts for parts in found if component not in parts), None)
    if lacking is not None:
        there = f"has {', '.join(lacking)}" if lacking else "has no parts"
        raise ConfigError([f"control.filters: component is {component!r}, but the reward of task {group.task.id!r} {there}"])
    return [parts[component] for parts in found]


def _roles_of(group: Group) -> list[list[float]]:
    """Scores of each role of a game, in the valid trajectories where it has a turn."""
    found: dict[str, list[float]] = {}
    for trajectory in group.trajectories:
        for role in dict.fromkeys(turn.role for turn in trajectory.turns if turn.role):
            if (score := score_of(trajectory, role)) is not None:
                found.setdefault(role, []).append(score)
    return list(found.values())


def _no_valid(scores: Sequence[float]) -> str | None:
    return None if scores else "no_valid"


class Selection(NamedTuple):
    """The rules that say which finished groups train, and which of them first."""

    filters: Sequence[Filter] = ()
    """In the order in which they are asked."""
    order: Order | None = None
    """None: the group that was started first comes first."""


def build_selection(control: ControlConfig) -> Selection:
    """The configured rules.

    Raises:
        ValueError: for an unknown name, options that a filter does not take, or a reference that does not resolve.
    """
    return Selection([_build(config) for config in control.filters], order_of(control))


def _build(config: FilterConfig) -> Filter:
    options = options_of(config)
    if isinstance(options, Hook):
        return partial(_verdict, options)
    return partial(FILTERS[config.name], **options.model_dump())


def _verdict(hook: Hook, group: Group) -> str | None:
    """The answer of a user's function.

    Raises:
        HookFailed: if it raises, or returns neither a reason nor None.
    """
    answer = hook(group)
    if answer is None or (isinstance(answer, str) and answer):
        return answer
    raise hook.refused(f"returned {answer!r} for task {group.task.id!r}; return why the group is dropped, or None")
