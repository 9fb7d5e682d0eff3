"""A first look at the files and functions that settings name, before torch is loaded: a mistake in them is answered at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from whet.build.labels import TRAINING, check_labels
from whet.build.tables import check_tables_early
from whet.data.config import PairColumns
from whet.data.files import Row, data_files, read_rows, split_slice
from whet.data.hub import HUB_NAME, check_model_folder
from whet.data.preference import preference_from
from whet.data.rows import fail_missing, task_from
from whet.data.source import SourceConfig, read_tasks
from whet.data.supervised import conversation_from
from whet.env.build import tools_of
from whet.reward.build import check_functions
from whet.rollout.filter_options import check_selection
from whet.rollout.sampling import check_fits
from whet.settings.rl import BaseRunConfig, RunConfig, evaluation_rows, training_rows
from whet.settings.supervised import PairRunConfig, SupervisedRunConfig
from whet.types import Task

WHOLE_BYTES = 1 << 24
"""Size of a data file up to which every row is looked at, not only the first one."""


def look_at(config: BaseRunConfig) -> None:
    """Look at what a run reads: the model's folder, rows of each data file, tools and rewards. Nothing is downloaded.

    Raises:
        ValueError: one of them is not there, or cannot be what the settings say.
    """
    check_model_folder(config.model.path)
    if isinstance(config, RunConfig):
        look_at_playing(config)
    elif isinstance(config, SupervisedRunConfig):
        data = config.data
        keys = {"messages_key": data.messages_key, "prompt_key": data.prompt_key, "response_key": data.response_key}
        for path in filter(None, (data.path, config.evaluate.path)):
            for row in _some_rows(path):
                _check_columns(row, keys)
                conversation_from(row, data)
    elif isinstance(config, PairRunConfig):
        _look_at_pairs(config.data.path, config.data)
        if config.evaluate.path is not None:
            _look_at_pairs(config.evaluate.path, None)


def look_at_playing(config: RunConfig, *, trains: bool = True) -> None:
    """Look at rows, tools, rewards, filters and auxiliary models.

    Args:
        config: settings of a run that plays rollouts.
        trains: false: it plays evaluation sets alone.

    Raises:
        ValueError: as `look_at`.
    """
    sets = config.evaluate.sets.values()
    sources = {TRAINING: training_rows(config)} if trains and config.data.source is None else {}
    sources |= {name: evaluation_rows(config, one) for name, one in config.evaluate.sets.items()}
    tasks = {name: _tasks(source, name or "train") for name, source in sources.items()}
    for env in filter(None, (config.env, *(one.env for one in sets))):
        tools_of(env)
    for reward in (config.reward, *(one.reward for one in sets)):
        if reward is not None:
            check_functions(reward)
    check_labels(config, tasks)
    if trains:
        check_selection(config.control)
        check_tables_early(config)
    _check_positions(config)


def _check_positions(config: RunConfig) -> None:
    """Refuse lengths beyond the model's positions, where settings or its config.json name them. Servers say theirs themselves."""
    file = Path(config.model.path).expanduser() / "config.json"
    try:
        known = ({} if not file.is_file() else json.loads(file.read_bytes())) | config.model.config
    except (OSError, ValueError, TypeError):  # the model's reader says what is wrong with it
        return
    positions = known.get("max_position_embeddings")
    if config.engine.num_servers or not isinstance(positions, int):
        return
    for rollout in (config.rollout, *(one.rollout.over(config.rollout) for one in config.evaluate.sets.values())):
        if rollout.fixed_max_tokens is not None:
            check_fits(rollout, positions)


def _tasks(source: SourceConfig, name: str) -> list[Task]:
    """Every row of small files on this machine, as the run will read it, and the first one of the others."""
    if all(_is_small(split_slice(entry)[0]) for entry in ([source.path] if isinstance(source.path, str) else source.path)):
        return read_tasks(source, name)
    return [task_from(row, source, name) for row in _some_rows(source.path)]


def _is_small(name: str) -> bool:
    path = Path(name).expanduser()
    return path.exists() and sum(file.stat().st_size for file in data_files(name)) <= WHOLE_BYTES


def _look_at_pairs(path: str | list[str], columns: PairColumns | None) -> None:
    for row in _some_rows(path):
        if columns is not None:
            _check_columns(row, {"chosen_key": columns.chosen_key, "rejected_key": columns.rejected_key})
            preference_from(row, columns)


def _check_columns(row: Row, keys: dict[str, str | None]) -> None:
    for key, name in keys.items():
        if name is not None and name not in row.values:
            fail_missing(row.origin, key, name, row.values)


def _some_rows(path: str | list[str]) -> Iterable[Row]:
    """Every row of the small data files on this machine, and the first one of the others."""
    for entry in [path] if isinstance(path, str) else path:
        name = split_slice(entry)[0]
        if _is_small(name):
            yield from read_rows(entry)
        elif Path(name).expanduser().exists() or not HUB_NAME.fullmatch(name.partition(":")[0]):
            yield from islice(read_rows(name), 1)
