"""`whet.train` and its like: a run from keyword arguments, in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from whet.api.callbacks import watch_of
from whet.api.given import Given, read_given
from whet.api.process import CallerThread, watched
from whet.api.run import Run
from whet.build.first_look import look_at
from whet.build.put_back import found_rows
from whet.build.run_dirs import (
    FRESH,
    Finished,
    changed_since,
    leave_nothing,
    new_or_unfinished,
    same_settings,
    set_aside,
    something_to_do,
)
from whet.config import ConfigError
from whet.here import holding
from whet.settings.rl import BaseRunConfig, check_together
from whet.settings.supervised import RUN_CONFIGS

if TYPE_CHECKING:
    from typing import Unpack

    from whet.api.keywords import DpoSettings, RewardModelSettings, SftSettings, TrainSettings  # pyright: ignore[reportMissingModuleSource]

Named = str | Callable[..., Any] | Mapping[str, Any]
"""A reward, an algorithm or an environment: a name, a function or class, or a table of settings."""
BATCH = {"prompts_per_rollout": 8, "samples_per_prompt": 8}
"""Batch of `train` where the caller gives none."""
CALLS = {"train": "train", "sft": "sft", "dpo": "dpo", "rm": "reward_model"}
"""Name in Python of each command."""


def train(
    model: str | Path | Mapping[str, Any],
    data: Any = None,
    reward: Named | Sequence[Named] | None = None,
    *,
    tools: Sequence[str | Callable[..., Any]] | None = None,
    algo: Named | None = None,
    test: Any = None,
    callbacks: Any = (),
    **settings: Unpack[TrainSettings],
) -> Run:
    """Train with reinforcement learning, as `whet train` does.

    Args:
        model: folder, or name on the Hugging Face hub.
        data: rows with a prompt and a label: the path of a file, a list of dictionaries, a data set or a data frame.
        reward: function of a trajectory, name of a built-in one, or several of them, whose scores are added up.
        tools: typed functions with a docstring that the model may call.
        algo: name of the algorithm, "grpo" unless given.
        test: rows that are not trained on; the reward on them is measured before and after training.
        callbacks: objects with `on_step(step, metrics)` or `on_evaluation(step, values)`; one that returns True ends the run.
        settings: every setting of `whet train --keys`; `train__optim__lr=1e-5` is `train.optim.lr`.

    Returns:
        The run.

    Raises:
        ValueError: the settings, the data or the model are wrong; the text says what to do.
        KeyboardInterrupt: the run was interrupted, and saved; the same call goes on with it.

    Example:
        run = whet.train("Qwen/Qwen3-0.6B", rows, reward=lambda t: float(t.task.label in t.response), num_rollouts=100)
    """
    tables = {**played_tables(model, data, reward, tools, algo), "evaluate": _test(test)}
    if not any(key.partition("__")[0] == "batch" for key in settings):
        tables["batch"] = BATCH
    return _run("train", tables, settings, callbacks)


def sft(
    model: str | Path | Mapping[str, Any], data: Any = None, *, test: Any = None, callbacks: Any = (), **settings: Unpack[SftSettings]
) -> Run:
    """Fine-tune on conversations, as `whet sft` does. Arguments as for `train`; rows have `messages`."""
    return _run("sft", _files(model, data, test), settings, callbacks)


def dpo(
    model: str | Path | Mapping[str, Any], data: Any = None, *, test: Any = None, callbacks: Any = (), **settings: Unpack[DpoSettings]
) -> Run:
    """Learn from preference pairs without a reward model, as `whet dpo` does. Rows have `chosen` and `rejected`."""
    return _run("dpo", _files(model, data, test), settings, callbacks)


def reward_model(
    model: str | Path | Mapping[str, Any],
    data: Any = None,
    *,
    test: Any = None,
    callbacks: Any = (),
    **settings: Unpack[RewardModelSettings],
) -> Run:
    """Train a reward model on preference pairs, as `whet rm` does. Rows have `chosen` and `rejected`."""
    return _run("rm", _files(model, data, test), settings, callbacks)


def _run(command: str, arguments: Mapping[str, Any], settings: Mapping[str, Any], callbacks: Any) -> Run:
    """Run a command that trains, to its end or until it is stopped."""
    kind, given = RUN_CONFIGS[command], read_given(arguments, settings)
    caller = CallerThread()
    watch = watch_of(callbacks, caller)
    with holding(given.functions):
        config, note = _placed(command, kind, given)
        folder = Path(config.run_dir)
        try:
            with something_to_do(config, given.same_rows):
                check_together(config)
                _check_processes(config, given, has_callbacks=watch is not None)
                config, aside = set_aside(config)
                with rows_in(given, folder), watched(watch):
                    look_at(config)
                    caller.run(lambda: _train(config, _resumed_by(command, folder), tuple(filter(None, (note, aside)))))
        except Finished as finished:
            print(str(finished).replace(" (--finished-ok: end with status 0)", ""), file=sys.stderr)
    return Run(folder, given.functions)


def _train(config: BaseRunConfig, command: str, notes: tuple[str, ...]) -> None:
    from whet.runs.job import train
    from whet.stop import Stopped

    try:
        train(config, command, notes)
    except Stopped as stopped:
        what = f"{stopped}, and saved in {config.run_dir}: the same call goes on"
        if stopped.exit_status == 130:
            raise KeyboardInterrupt(what) from None
        raise SystemExit(stopped.exit_status) from stopped


def _placed(command: str, kind: type[BaseRunConfig], given: Given) -> tuple[BaseRunConfig, str]:
    """The settings with the run's folder, and a note for the user."""
    if "run_dir" in given.tree:
        return given.config(kind, Path(given.tree["run_dir"])), ""
    given.config(kind, Path("runs/default"))  # what is wrong with the settings comes before any look at folders

    def is_same(folder: Path) -> bool:
        config = given.config(kind, folder)
        if config.checkpoint.resume == FRESH:
            return False
        return same_settings(config, folder) and given.same_rows(folder) and not changed_since(config, folder)

    folder, note = new_or_unfinished(Path(CALLS[command]), is_same)
    return given.config(kind, folder), note


@contextmanager
def rows_in(given: Given, folder: Path) -> Iterator[None]:
    """Context of a run whose rows are in its folder. One that fails before anything leaves nothing, and earlier rows as they were."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    before = found_rows(folder, given.rows)
    given.write_rows(folder)
    try:
        yield
    except BaseException as error:  # raised again, whatever it is
        if not isinstance(error, KeyboardInterrupt):
            before.put_back()
            leave_nothing(folder, made)
        raise


def _check_processes(config: BaseRunConfig, given: Given, *, has_callbacks: bool) -> None:
    """Refuse functions of this process in a run whose processes are others.

    Raises:
        ValueError: with their names.
    """
    degrees = config.train.degrees
    alone = (degrees is None or degrees.num_ranks == 1) and config.cluster.backend == "local"
    here = [*given.functions, *(["callbacks"] if has_callbacks else [])]
    if here and not alone:
        raise ValueError(
            f"the settings start processes of their own (train.parallel, cluster.backend), which have no {', '.join(here)} of this one: "
            "put the functions into a file (my_code.py) and import them from there, or start this script by torchrun"
        )


def _resumed_by(command: str, folder: Path) -> str:
    """The call that goes on with a run."""
    return f"whet.{CALLS[command]}(..., run_dir={str(folder)!r})"


def played_tables(model: Any, data: Any, reward: Any, tools: Any, algo: Any) -> dict[str, Any]:
    """Tables of a run that plays rollouts."""
    if callable(tools) or isinstance(tools, str):
        raise ConfigError([f"tools is one {type(tools).__name__}: give a list of them, tools=[{getattr(tools, '__name__', repr(tools))}]"])
    env = None if tools is None else {"name": "tools", "tools": list(tools)}
    named = {"model": _named(model, "path"), "algo": _named(algo, "name"), "env": env}
    return {**named, "data": _data(data, "train"), "reward": _reward(reward)}


def _files(model: Any, data: Any, test: Any) -> dict[str, Any]:
    return {"model": _named(model, "path"), "data": _data(data, "path"), "evaluate": None if test is None else {"path": test}}


def _test(test: Any) -> dict[str, Any] | None:
    return None if test is None else {"before_training": True, "sets": {"test": {"path": test}}}


def _named(value: Any, key: str) -> Any:
    return value if value is None or isinstance(value, Mapping) else {key: value}


def _data(data: Any, key: str) -> Any:
    """The table of data: the argument may be the table itself."""
    is_table = isinstance(data, Mapping) and not any(hasattr(value, "column_names") for value in data.values())
    if is_table and data and key not in data and all(isinstance(value, list | tuple) for value in data.values()):
        raise ConfigError([f"data has columns ({', '.join(map(str, data))}): give a list of rows, or pandas.DataFrame(data)"])
    return data if data is None or is_table else {key: data}


def _reward(reward: Any) -> Any:
    for each in cast(Sequence[Any], reward if isinstance(reward, list | tuple) else [reward]):
        if not (each is None or isinstance(each, str | Mapping) or callable(each)):
            raise ConfigError(
                [
                    f"reward is {each!r}, a {type(each).__name__}: give the function itself (reward=f), which whet calls for each "
                    "trajectory, and not what it returns (reward=f(...))"
                ]
            )
    if not isinstance(reward, list | tuple):
        return _named(reward, "name")
    names = [each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__) for each in reward]
    if len(set(names)) < len(names):
        table = "reward={'components': {'one': {'name': f}, 'other': {'name': g}}}"
        raise ConfigError([f"reward: two of {', '.join(names)} have the same name; name them in a table: {table}"])
    return {"components": {name.rpartition(":")[2]: _named(each, "name") for name, each in zip(names, reward, strict=True)}}


def new_folder(name: str) -> Path:
    """A folder in `runs` that is not there yet."""
    stem = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(path for n in range(1, 1000) if not (path := stem if n == 1 else stem.with_name(f"{stem.name}.{n}")).exists())
