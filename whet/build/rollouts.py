"""Rollouts from a configuration, and the user's functions that a run calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from whet.config import Hook, code_digests
from whet.config.dump import plain
from whet.data.source import Source
from whet.rollout.filters import Selection, build_selection
from whet.rollout.recipe import Recipe
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.scheduler import Rollouts, RolloutSpec
from whet.rollout.user_rollouts import OwnRollouts
from whet.settings.rl import RunConfig


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a run that calls a function of the user's."""

    named: Callable[[RunConfig], str | None]
    """Returns the setting that names the function; None: not set."""
    given: tuple[str, ...]
    """Names of its arguments."""
    awaited: bool = False


PLACES: dict[str, Place] = {
    "rollout.play": Place(lambda config: config.rollout.play, ("run", "env"), awaited=True),
    "control.rollout": Place(lambda config: config.control.rollout, ("ask",), awaited=True),
    "batch.process": Place(lambda config: config.batch.process, ("samples", "groups")),
    "observe.on_rollout": Place(lambda config: config.observe.on_rollout, ("rollout_id", "groups", "dropped", "metrics")),
}
"""Places by the key that names the function."""


def find_hook(config: RunConfig, key: str) -> Hook | None:
    """Function that a setting names; None: it names none.

    Raises:
        ConfigError: there is no such function, or it cannot be called as it would be.
    """
    place = PLACES[key]
    reference = place.named(config)
    return None if reference is None else Hook.of(key, reference, place.given, awaited=place.awaited)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the user's that a run calls, or the built-in ones in the same places."""

    selection: Selection
    rollout: Hook | None
    recipe: Recipe
    on_rollout: Hook | None


def build_hooks(config: RunConfig) -> Hooks:
    """Find the functions that the settings name, before the weights are read, which takes long.

    Raises:
        ValueError: naming the key of one that is not there, or cannot be called as it will be.
    """
    control = config.control
    found = {key: find_hook(config, key) for key in PLACES}
    recipe = Recipe(config.batch.train_on, control.max_staleness, control.too_old, found["batch.process"])
    return Hooks(build_selection(control), found["control.rollout"], recipe, found["observe.on_rollout"])


def build_rollouts(
    config: RunConfig, hooks: Hooks, source: Source, runner: TrajectoryRunner, wanted: RolloutSpec, num_rollouts: int
) -> Rollouts | OwnRollouts:
    """Build the rollouts of a run: the scheduler, or a function of the user's."""
    if hooks.rollout is not None:
        return OwnRollouts(hooks.rollout, source, runner, wanted, config.seed)
    return Rollouts(source, runner, config.control, wanted, num_rollouts, config.seed, hooks.selection, played_by(config))


def played_by(config: RunConfig) -> str:
    """Digest (sha256) of the settings and of the user's code that decide about a trajectory: limits,
    sampling, environment, tools, reward.

    Trajectories of another digest are not trained on.
    """
    tables = {"rollout": plain(config.rollout), "env": plain(config.env), "reward": plain(config.reward)}
    text = json.dumps([tables, code_digests(tables)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
