"""Labels and metadata of rows, looked at before anything is played."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from whet.data.rows import missing_label
from whet.env.build import ENVS
from whet.reward.base import LabelError
from whet.reward.labels import text_of_faults, unusable_rows
from whet.settings.rl import RunConfig, evaluation_env, evaluation_reward, evaluation_rows, training_rows
from whet.types import Task

TRAINING = ""
"""Name of training in tables of evaluation sets."""


def check_labels(config: RunConfig, tasks: Mapping[str, Sequence[Task]]) -> None:
    """Check that the rewards can score every row. A faulty row would end the run when it is played, perhaps
    after hours.

    Args:
        config: the run's settings.
        tasks: training's by `TRAINING`, an evaluation set's by its name. Where an environment of the user's
            may change them, they are not looked at.

    Raises:
        LabelError: quoting the first rows that cannot be scored, with their places.
    """
    with ThreadPoolExecutor(1) as thread:  # the caller's may have a loop that runs
        thread.submit(_check_labels, config, tasks).result()


def _check_labels(config: RunConfig, tasks: Mapping[str, Sequence[Task]]) -> None:
    for name, rows in tasks.items():
        chosen = None if name == TRAINING else config.evaluate.sets[name]
        env = config.env if chosen is None else evaluation_env(config, chosen)
        if env.name in ENVS:
            reward = config.reward if chosen is None else evaluation_reward(config, chosen)
            faults = asyncio.run(unusable_rows(reward, rows))
            if faults:
                source = training_rows(config) if chosen is None else evaluation_rows(config, chosen)
                where = "of training" if chosen is None else f"of the evaluation set {name}"
                raise LabelError(text_of_faults(where, faults, len(rows)) + missing_label(source.path, source.label_key))
