"""A run's folder while a process works in it: lock, settings, list of starts, signals, and the end of the
run.
"""

from __future__ import annotations

import faulthandler
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TextIO

import torch

from whet.build.process import prepare_process
from whet.build.put_back import FoundFolder, found_folder
from whet.build.run_dirs import leave_nothing
from whet.checkpoint.store import CheckpointStore, checkpoints_in
from whet.config import changed_code, code_digests, dump_toml
from whet.files import replace_file
from whet.rollout.runner import Stalled
from whet.runfolder.environment import environment
from whet.runfolder.journal import STARTS, Journal, read_rows
from whet.runfolder.lock import claim
from whet.settings.rl import BaseRunConfig
from whet.stop import Stop, Stopped, on_signals
from whet.threads import ThreadWatch
from whet.types import JSON

STACKS = "stacks.txt"
"""File with the stacks of all threads, written when something takes too long."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Objects of a run whose folder this process holds."""

    folder: Path
    notes: list[str]
    """Notes for the user who started it."""
    journal: Journal
    stop: Stop
    environment: Mapping[str, JSON]
    threads: ThreadWatch


@contextmanager
def open_run(config: BaseRunConfig, command: str) -> Iterator[OpenRun]:
    """Claim the run's folder and write the resolved configuration into it. Files of earlier starts are kept.

    Args:
        config: the run's settings.
        command: the typed command line, which also resumes the run.

    Raises:
        ValueError: if the folder cannot be written, another process works in it, or it holds checkpoints and
            `checkpoint.resume` is false; the folder is then as it was.

    A start that fails before it has played or trained anything leaves no folder that was not there before, and a run's folder as it was.
    """
    folder = Path(config.run_dir)
    made = _make_writable(folder)
    try:
        with _claimed(config, command, folder) as session:
            yield session
    except BaseException as error:  # whatever ends the start, a user's code included; it is raised again
        if not isinstance(error, Stopped | KeyboardInterrupt):
            leave_nothing(folder, made)
        raise


@contextmanager
def _claimed(config: BaseRunConfig, command: str, folder: Path) -> Iterator[OpenRun]:
    """Claim the folder, and put its files back if the start comes to nothing."""
    with claim(folder, command), on_signals() as stop:
        CheckpointStore(folder / "checkpoints", config.checkpoint).check_resume()  # before anything in the folder is touched
        before = found_folder(folder)
        try:
            with _started(config, command, before, stop) as session:
                yield session
        except BaseException as error:  # whatever ends the start; it is raised again
            if before.is_of_run or not isinstance(error, Stopped | KeyboardInterrupt):
                before.put_back()
            raise


@contextmanager
def _started(config: BaseRunConfig, command: str, before: FoundFolder, stop: Stop) -> Iterator[OpenRun]:
    """Write down a start and its end."""
    folder = before.folder
    notes = _settle(config, before)
    starts = read_rows(folder / STARTS)
    notes += _clock_notes(starts)
    prepare_process(config, _threads_before(starts) if config.deterministic else None)
    threads = ThreadWatch(on_cpu=config.model.device == "cpu" or not torch.cuda.is_available())
    notes += threads.at_start()
    journal, found = Journal(folder), environment()
    code = code_digests(config)
    if starts and (other := changed_code(starts[-1].get("code") or {}, code)):
        notes.append(f"the code of {', '.join(other)} is not what it was at the last start here")
    changed = journal.started(command, found, code)
    if changed:
        notes.append(f"the environment changed since the last start, so the same bits are not to be expected: {'; '.join(changed)}")
    try:
        with _warnings_noted(journal):
            yield OpenRun(folder, notes, journal, stop, found, threads)
    except BaseException as error:
        if isinstance(error, Stalled):
            with suppress(OSError), open(folder / STACKS, "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        journal.ended("stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed", error, command)
        raise
    else:
        journal.ended("finished")
    finally:
        journal.close()


@contextmanager
def _warnings_noted(journal: Journal) -> Iterator[None]:
    """Write Python's warnings into the run's log, too."""
    shown = warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
    ) -> None:
        journal.line(str(message), "warning")
        shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name_<n>` with the first n from 1 on that is not taken."""
    return next(path for n in count(1) if not (path := parent / f"{name}_{n}").exists())


def _threads_before(starts: Sequence[Mapping[str, JSON]]) -> int | None:
    """Number of torch's threads at the folder's last start: another number could add in another order."""
    return starts[-1]["environment"]["cpu"]["threads"] if starts else None


def _clock_notes(starts: Sequence[Mapping[str, JSON]]) -> list[str]:
    """Note if the clock was set back since the last start."""
    if not starts or starts[-1]["time"] <= time.time():
        return []
    then, now = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (starts[-1]["time"], time.time()))
    return [
        f"the clock was set back: the last start here was at {then}, and now it is {now}. Times in metrics.jsonl and log.txt are out of "
        "order; nothing else goes by the clock"
    ]


def _make_writable(folder: Path) -> list[Path]:
    """Make the folder. Returns those that were not there, the innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"run_dir: {folder} cannot be written: {error.strerror}; choose another with run_dir=PATH") from error
    return made


def _settle(config: BaseRunConfig, before: FoundFolder) -> list[str]:
    """Write config.toml; what it replaces, and a log that no checkpoint goes with, are set aside."""
    notes: list[str] = []
    folder = before.folder
    path, text = folder / "config.toml", dump_toml(config)
    if path.exists() and path.read_text() != text:
        kept = _set_aside(path, before)
        changed = changed_settings(kept.read_text(), text)
        notes.append(f"settings changed since the last start in {folder}: {changed}; the old ones are in {kept.name}")
    if not path.exists():
        replace_file(path, text)
    log = folder / "metrics.jsonl"
    if log.exists() and log.stat().st_size and not checkpoints_in(folder / "checkpoints"):
        parts = (folder / name for name in ("metrics.jsonl", "rollouts", "evaluations"))
        aside = [_set_aside(part, before).name for part in parts if part.exists()]
        notes.append(f"an earlier start left no checkpoint: this one begins afresh, what it wrote is in {', '.join(aside)}")
    return notes


def changed_settings(before: str, after: str) -> str:
    """Differences between two configurations in TOML, in words."""
    try:
        old, new = (_flat(tomllib.loads(text)) for text in (before, after))
    except tomllib.TOMLDecodeError as error:
        return f"the old ones cannot be read ({error})"
    weights = {"model.path": "; a checkpoint goes on with its own weights, and another run_dir begins with these"}
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    return ", ".join(f"{key} = {new.get(key)!r} (was {old.get(key)!r}{weights.get(key, '')})" for key in changed)


def _set_aside(path: Path, before: FoundFolder) -> Path:
    """Rename a file to `stem.<n>.suffix`, the first that is free."""
    kept = next(p for n in count(1) if not (p := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
    before.aside.append((path, kept))
    return path.rename(kept)


def _flat(tree: Mapping[str, JSON], prefix: str = "") -> dict[str, JSON]:
    out: dict[str, JSON] = {}
    for key, value in tree.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out
