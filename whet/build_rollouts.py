"""From a configuration to what plays rollouts, and the functions of a user's own that are called between a run's parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whet.config import Hook
from whet.data.source import Source
from whet.rollout.filters import Filter, build_filters
from whet.rollout.order import Order
from whet.rollout.own import OwnRollouts
from whet.rollout.player import Player
from whet.rollout.recipe import Recipe
from whet.rollout.scheduler import Rollouts, Wanted
from whet.settings import RunConfig


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run calls a function of the user's."""

    named: Callable[[RunConfig], str | None]
    """The setting."""
    given: tuple[str, ...]
    """What it is called with."""
    awaited: bool = False


PLACES: dict[str, Place] = {
    "rollout.play": Place(lambda config: config.rollout.play, ("run", "env"), awaited=True),
    "control.rollout": Place(lambda config: config.control.rollout, ("ask",), awaited=True),
    "batch.process": Place(lambda config: config.batch.process, ("samples", "groups")),
    "observe.on_rollout": Place(lambda config: config.observe.on_rollout, ("rollout_id", "groups", "dropped", "metrics")),
}
"""By the key that names the function."""


def find_hook(config: RunConfig, key: str) -> Hook | None:
    """The function that a setting names; None: it names none.

    Raises:
        ConfigError: there is no such function, or it cannot be called as it would be.
    """
    place = PLACES[key]
    reference = place.named(config)
    return None if reference is None else Hook.of(key, reference, place.given, awaited=place.awaited)


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a run calls of a user's, and the built-in things that stand in the same places."""

    filters: Sequence[Filter]
    order: Order | None
    rollout: Hook | None
    recipe: Recipe
    on_rollout: Hook | None


def build_hooks(config: RunConfig) -> Hooks:
    """The functions that the settings name. They are found before weights are read, which takes long.

    Raises:
        ValueError: naming the key of one that is not there, or cannot be called as it will be.
    """
    control = config.control
    found = {key: find_hook(config, key) for key in PLACES}
    filters, order = build_filters(control)
    recipe = Recipe(config.batch.train_on, control.max_staleness, control.too_old, found["batch.process"])
    return Hooks(filters, order, found["control.rollout"], recipe, found["observe.on_rollout"])


def build_rollouts(
    config: RunConfig, hooks: Hooks, source: Source, player: Player, wanted: Wanted, num_rollouts: int
) -> Rollouts | OwnRollouts:
    """What plays a run's rollouts: the scheduler, or a function of the user's."""
    if hooks.rollout is not None:
        return OwnRollouts(hooks.rollout, source, player, wanted, config.seed)
    return Rollouts(source, player, config.control, wanted, num_rollouts, config.seed, hooks.filters, hooks.order)
