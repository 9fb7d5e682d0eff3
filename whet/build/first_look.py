"""A first look at the files and functions that settings name, before torch is loaded: a mistake in them is answered at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from whet.data.config import PairColumns
from whet.data.files import Row, read_rows, split_slice
from whet.data.hub import HUB_NAME, check_model_folder
from whet.data.rows import fail_missing, task_from
from whet.env.tool_sets import build_tools
from whet.reward.build import check_functions
from whet.settings.rl import BaseRunConfig, RunConfig, evaluation_rows, training_rows
from whet.settings.supervised import PairRunConfig, SupervisedRunConfig


def look_at(config: BaseRunConfig) -> None:
    """Look at what a run reads: the model's folder, the first row of each data file, tools and rewards. Nothing is downloaded.

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
            for row in _first_rows(path):
                _check_columns(row, keys)
    elif isinstance(config, PairRunConfig):
        _look_at_pairs(config.data.path, config.data)
        if config.evaluate.path is not None:
            _look_at_pairs(config.evaluate.path, None)


def look_at_playing(config: RunConfig, *, trains: bool = True) -> None:
    """Look at rows, tools and rewards.

    Args:
        config: settings of a run that plays rollouts.
        trains: false: it plays evaluation sets alone.

    Raises:
        ValueError: as `look_at`.
    """
    sets = config.evaluate.sets.values()
    sources = [training_rows(config)] if trains and config.data.source is None else []
    for source in (*sources, *(evaluation_rows(config, one) for one in sets)):
        for row in _first_rows(source.path):
            task_from(row, source, "first")
    for env in filter(None, (config.env, *(one.env for one in sets))):
        for tool in env.tools:
            build_tools(tool, given={"sandbox": env.sandbox})
    for reward in (config.reward, *(one.reward for one in sets)):
        if reward is not None:
            check_functions(reward)


def _look_at_pairs(path: str | list[str], columns: PairColumns | None) -> None:
    for row in _first_rows(path):
        if columns is not None:
            _check_columns(row, {"chosen_key": columns.chosen_key, "rejected_key": columns.rejected_key})


def _check_columns(row: Row, keys: dict[str, str | None]) -> None:
    for key, name in keys.items():
        if name is not None and name not in row.values:
            fail_missing(row.origin, key, name, row.values)


def _first_rows(path: str | list[str]) -> Iterable[Row]:
    """The first row of each data file on this machine."""
    for entry in [path] if isinstance(path, str) else path:
        name = split_slice(entry)[0]
        if Path(name).expanduser().exists() or not HUB_NAME.fullmatch(name.partition(":")[0]):
            first = next(iter(read_rows(name)), None)
            if first is not None:
                yield first
