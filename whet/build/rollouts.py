"""From a configuration to what plays rollouts, and the functions of a user's own that are called between a run's parts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whet.config import Hook, code_digests
from whet.config.dump import plain
from whet.data.rows import missing_label
from whet.data.source import Source
from whet.env.build import ENVS
from whet.reward import LabelError
from whet.reward.labels import told_rows, unusable_rows
from whet.rollout.filters import Filter, build_filters
from whet.rollout.order import Order
from whet.rollout.own import OwnRollouts
from whet.rollout.player import Player
from whet.rollout.recipe import Recipe
from whet.rollout.scheduler import Rollouts, RolloutSpec
from whet.settings.rl import RunConfig, evaluation_env, evaluation_rows, training_rows
from whet.types import Task

TRAINING = ""
"""Stands for training where evaluation sets go by their names."""


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
    config: RunConfig, hooks: Hooks, source: Source, player: Player, wanted: RolloutSpec, num_rollouts: int
) -> Rollouts | OwnRollouts:
    """What plays a run's rollouts: the scheduler, or a function of the user's."""
    if hooks.rollout is not None:
        return OwnRollouts(hooks.rollout, source, player, wanted, config.seed)
    return Rollouts(source, player, config.control, wanted, num_rollouts, config.seed, hooks.filters, hooks.order, played_by(config))


def check_labels(config: RunConfig, tasks: Mapping[str, Sequence[Task]]) -> None:
    """See that the rewards can score every row. A row that they could not would end the run when it is played, which may take hours.

    Args:
        config: the run's settings.
        tasks: training's by `TRAINING`, an evaluation set's by its name. Where an environment of the user's may change them, they are not
            looked at.

    Raises:
        LabelError: quoting the first rows that cannot be scored, with their places.
    """
    for name, rows in tasks.items():
        chosen = None if name == TRAINING else config.evaluate.sets[name]
        env = config.env if chosen is None else evaluation_env(config, chosen)
        if env.name in ENVS:
            reward = config.reward if chosen is None or chosen.reward is None else chosen.reward
            faults = asyncio.run(unusable_rows(reward, rows))
            if faults:
                source = training_rows(config) if chosen is None else evaluation_rows(config, chosen)
                where = "of training" if chosen is None else f"of the evaluation set {name}"
                raise LabelError(told_rows(where, faults, len(rows)) + missing_label(source.path, source.label_key))


def played_by(config: RunConfig) -> str:
    """The sha256 of the settings and of the user's code that say what a trajectory becomes: limits, sampling, environment, tools, reward.
    What was played by others is not trained on as if it were by these."""
    tables = {"rollout": plain(config.rollout), "env": plain(config.env), "reward": plain(config.reward)}
    text = json.dumps([tables, code_digests(tables)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
