"""Folder of a start if the settings name none, and starts of runs that have ended."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from whet.checkpoint.store import CheckpointStore
from whet.config import changed_code, code_digests, dump_toml
from whet.env.mcp import listed
from whet.env.sandbox.probe import RECORD
from whet.runfolder.journal import END, FAILURES, LOG, STARTS, read_rows
from whet.runfolder.lock import LOCK, OWNER, owner_of
from whet.settings.rl import BaseRunConfig

Settings = TypeVar("Settings", bound=BaseRunConfig)

ROWS = "data"
"""Folder in a run's folder for rows that it got as objects, from Python."""
FRESH = "fresh"
"""Value of `checkpoint.resume` by which a run begins again from the start."""
RUNS = Path("runs")
"""Parent of the folders that no setting names."""
OF_A_START = {"config.toml", "metrics.jsonl", STARTS, LOG, FAILURES, END, LOCK, OWNER, RECORD, listed.RECORD}
"""Files that a start makes first."""


class Finished(Exception):
    """The run has come to its end before: there is nothing to train."""


def placed(config: Settings, file: Path) -> tuple[Settings, str]:
    """Choose a run folder. Returns the settings with it, and a note for the user; "" if the settings name it.
    The folder is that of `new_or_unfinished`.
    """
    if "run_dir" in config.model_fields_set:
        return config, ""
    goes_on = config.checkpoint.resume != FRESH
    folder, note = new_or_unfinished(file, lambda folder: goes_on and same_settings(_in_folder(config, folder), folder))
    return _in_folder(config, folder), note


def new_or_unfinished(file: Path, is_same: Callable[[Path], bool]) -> tuple[Path, str]:
    """Folder of a run that no setting places, and a note for the user.

    It is `runs/<name of the file>-<time>`. A run of this file that did not finish, and that `is_same` takes for the one that is asked for,
    goes on. In a job that torchrun started, whose processes must agree, it is `runs/<name of the file>`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return RUNS / file.stem, ""
    for folder in _folders_of(file):
        if not _has_finished(folder) and is_same(folder) and _is_free(folder):
            note = f"{folder} did not finish and has the same settings: it goes on (to start a new run, name another folder: run_dir=PATH)"
            return folder, note
    stem = f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if n == 1 else f"{stem}.{n}" for n in count(1))
    folder = next(path for name in names if not (path := RUNS / name).exists())
    return folder, f"a new run in {folder}"


def newest_of(config: Settings, file: Path) -> tuple[Settings, str]:
    """Choose the folder of the newest run of the file. Returns the settings with it, and a note for the user;
    as `placed` if there is none.
    """
    found = None if "run_dir" in config.model_fields_set else next(_folders_of(file), None)
    return placed(config, file) if found is None else (_in_folder(config, found), f"the newest run of {file} is {found}")


@contextmanager
def something_to_do(config: BaseRunConfig, same_rows: Callable[[Path], bool] = lambda _: True) -> Iterator[None]:
    """Context of a start in the folder. A start that has nothing to train raises: at once if the settings are
    those of the last start, else once these were found to be good.

    Args:
        config: the settings.
        same_rows: tells of a run's folder if rows that the start has as objects are those of the run.

    Raises:
        Finished: if the run in the folder had come to its end, and these settings ask for no more of it.
        ValueError: the folder cannot be a run's.
    """
    _check_place(config)
    folder = Path(config.run_dir)
    store = CheckpointStore(folder / "checkpoints", config.checkpoint)
    done = store.num_done() if _has_finished(folder) and config.checkpoint.resume is True else None
    what = "rollouts" if "num_rollouts" in type(config).model_fields else "steps"
    changed = [] if done is None else [*changed_since(config, folder), *([] if same_rows(folder) else ["the rows"])]
    since = f" Since then have changed: {', '.join(changed)}; a run with them needs another run_dir." if changed else ""
    finished = Finished(
        f"finished: the run in {folder} has done all of its {done} {what}, so nothing is trained.{since} Raise num_{what} (or num_epochs), "
        "or choose another run_dir (--finished-ok: end with status 0)"
    )
    if done is not None and same_settings(config, folder):
        raise finished
    yield
    if done is not None and store.num_done() == done:
        raise finished


def _check_place(config: BaseRunConfig) -> None:
    """Refuse a run's folder in which the run would lay its files over others.

    Raises:
        ValueError: it is a file or a model's folder, has a config.toml that no run wrote, or the trained model would replace `model.path`.
    """
    folder = Path(config.run_dir)
    what = ""
    if folder.exists() and not folder.is_dir():
        what = "is a file"
    elif (folder / "config.json").exists():
        what = "is the folder of a model"
    elif (folder / "config.toml").exists() and not any((folder / name).exists() for name in (STARTS, LOCK, "checkpoints")):
        what = "has a config.toml of yours, which the settings of the run would replace"
    elif Path(config.model.path).expanduser().resolve() == (folder / "model").resolve():
        what = f"would have the trained model in {folder / 'model'}, in place of the one that it begins with (model.path)"
    if what:
        raise ValueError(f"run_dir: {config.run_dir} {what}; choose another with run_dir=PATH")


def set_aside(config: Settings) -> tuple[Settings, str]:
    """Rename the folder of an earlier run, if `checkpoint.resume` is fresh. Returns the settings of the new run, which goes on like any
    other, and a note for the user.

    Raises:
        ValueError: another process works in the folder.
    """
    if config.checkpoint.resume != FRESH:
        return config, ""
    folder = Path(config.run_dir)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": True})})
    if not (folder / "config.toml").exists() or int(os.environ.get("RANK", "0")) > 0:
        return config, ""
    if (owner := owner_of(folder)) is not None:
        raise ValueError(f"checkpoint.resume is fresh, but {owner} works in {folder}: wait for its end, or name another run_dir")
    kept = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.{n}")).exists())
    folder.rename(kept)
    return config, f"checkpoint.resume is fresh: the earlier run in {folder} is now {kept}"


def _in_folder(config: Settings, folder: Path) -> Settings:
    return config.model_copy(update={"run_dir": str(folder)})


def _folders_of(file: Path) -> Iterator[Path]:
    """Folders of a file's runs, the newest first."""
    return (path.parent for path in sorted(RUNS.glob(f"{file.stem}-[0-9]*/config.toml"), reverse=True))


def _has_finished(folder: Path) -> bool:
    try:
        return json.loads((folder / END).read_text())["status"] == "finished"
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or a crash tore it
        return False


def same_settings(config: BaseRunConfig, folder: Path) -> bool:
    """True if the folder's last start had these settings. Degrees that `train.parallel=auto` chose are not
    compared.
    """
    with suppress(OSError, tomllib.TOMLDecodeError):
        trees = [tomllib.loads(text) for text in ((folder / "config.toml").read_text(), dump_toml(config))]
        if config.train.parallel == "auto":
            for tree in trees:
                cast(dict[str, Any], tree["train"]).pop("parallel", None)
        return trees[0] == trees[1]
    return False


def changed_since(config: BaseRunConfig, folder: Path) -> list[str]:
    """Functions that are not what they were at the folder's last start."""
    starts = read_rows(folder / STARTS)
    return changed_code(starts[-1].get("code") or {}, code_digests(config)) if starts else []


def _is_free(folder: Path) -> bool:
    try:
        return owner_of(folder) is None
    except ValueError:
        return False


def leave_nothing(folder: Path, made: Sequence[Path]) -> None:
    """Remove the folder of a start that failed before it did anything. A folder that was there before stays,
    and so does one with records or logs.
    """
    if folder not in made:
        return
    with suppress(OSError):
        there = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
        empty = all(there[name].stat().st_size == 0 for name in ("metrics.jsonl", FAILURES) if name in there)
        if {name for name in there if not name.startswith(f"{ROWS}/")} <= OF_A_START and empty:
            for path in there.values():
                path.unlink()
            for path in sorted(folder.rglob("*"), reverse=True):  # folders for what never came
                path.rmdir()
            for path in made:
                path.rmdir()
