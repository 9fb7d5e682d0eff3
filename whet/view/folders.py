"""The folders that are viewed: which runs they hold, and files in them without a way out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.observe.records.files import INDEX, ROLLOUTS, record_files, rollout_of

MAX_TEXT_BYTES = 64 * 2**20
"""Largest file of text that is read whole. Of a longer one the end is read."""
EVALUATIONS = "evaluations"
"""The folder of a run's evaluation sets."""
DEEPEST = 3
"""Folders below a named one in which runs are looked for."""


@dataclass(frozen=True, slots=True)
class ViewedRun:
    """A run, or an evaluation set of one: a folder with records, metrics or both."""

    name: str
    """Its name in addresses, unique on the page."""
    root: Path
    """The named folder that nothing is read outside of."""
    folder: Path
    settings: Path
    """The folder with the run's settings: its own, or that of the run whose evaluation it is."""
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Words of a lesson."""

    def path(self, *parts: str) -> Path | None:
        """A file of the run. None: there is none, or a link leads out of the named folder."""
        return inside(self.root, self.folder.joinpath(*parts))

    def records(self) -> Path | None:
        """The folder of its records."""
        for folder in (self.folder / ROLLOUTS, self.folder):
            if folder.is_dir() and (record_files(folder) or record_files(folder / INDEX)):
                return inside(self.root, folder, folders=True)
        return None

    def config(self) -> dict[str, Any]:
        """The run's settings; empty where it has none that can be read."""
        path = inside(self.root, self.settings / "config.toml")
        if path is None or path.stat().st_size > MAX_TEXT_BYTES:
            return {}
        try:
            return tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
        except tomllib.TOMLDecodeError:
            return {}

    def section(self, name: str) -> dict[str, Any]:
        """A table of the run's settings; empty where there is none."""
        found = self.config().get(name)
        return found if isinstance(found, dict) else {}


def inside(root: Path, path: Path, *, folders: bool = False) -> Path | None:
    """The path, if it is a plain file (or a folder) below `root` after every link is followed; else None."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    if not real.is_relative_to(root.resolve()) or not (real.is_dir() if folders else real.is_file()):
        return None
    return real


def find_runs(paths: Sequence[Path]) -> list[ViewedRun]:
    """The runs of the named folders, each with its evaluation sets behind it. A run that has only started is one, too.

    Raises:
        ValueError: a folder is not there, or holds no run.
    """
    found: list[ViewedRun] = []
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"there is no folder {path}: give a run's folder (its run_dir)")
        here = _below(path, path, 0)
        if not here:
            raise ValueError(f"{path} has neither records nor metrics.jsonl: give a run's folder (its run_dir), or one with runs in it")
        found += here
    names: dict[str, int] = {}
    out: list[ViewedRun] = []
    for run in found:
        names[run.name] = count = names.get(run.name, 0) + 1
        out.append(run if count == 1 else ViewedRun(f"{run.name} ({count})", run.root, run.folder, run.settings))
    return out


def _below(root: Path, folder: Path, depth: int) -> list[ViewedRun]:
    if _is_run(root, folder):
        sets = folder / EVALUATIONS
        found = sorted(sets.iterdir()) if inside(root, sets, folders=True) else []
        evaluated = [_run(root, each, folder) for each in found if _is_run(root, each)]
        alone = bool(evaluated) and not _has_data(root, folder)  # it evaluates and does nothing else
        return [*([] if alone else [_run(root, folder, folder)]), *evaluated]
    if depth == DEEPEST:
        return []
    below = [each for each in sorted(folder.iterdir()) if each.is_dir() and not each.is_symlink() and not each.name.startswith(".")]
    return [run for each in below for run in _below(root, each, depth + 1)]


def _is_run(root: Path, folder: Path) -> bool:
    if inside(root, folder, folders=True) is None:
        return False
    return inside(root, folder / "starts.jsonl") is not None or _has_data(root, folder)


def _has_data(root: Path, folder: Path) -> bool:
    places = (folder, folder / ROLLOUTS, folder / INDEX, folder / ROLLOUTS / INDEX)
    return inside(root, folder / "metrics.jsonl") is not None or any(record_files(each) for each in places if each.is_dir())


def _run(root: Path, folder: Path, settings: Path) -> ViewedRun:
    real = root.resolve()
    below = folder.resolve().relative_to(real).parts
    notes = inside(root, folder / "lesson.json")
    name = "/".join((real.name, *below)).encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")
    return ViewedRun(name, root, folder, settings, {} if notes is None else _words_of(notes))


def _words_of(path: Path) -> dict[str, Any]:
    """Words of a lesson; none where the file has other ones than a lesson's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    kinds = {"title": dict, "text": list, "stops": list}
    is_lesson = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    return found if is_lesson else {}


def rollouts_of(run: ViewedRun) -> list[int]:
    """The rollouts of a run that have records or an index, in order."""
    folder = run.records()
    if folder is None:
        return []
    files = [*record_files(folder), *record_files(folder / INDEX)]
    return sorted({number for file in files if (number := rollout_of(file)) is not None})


def json_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file from a byte on, as objects, and the byte after them. A line that is no object is left out."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        start = start if 0 <= start <= size else 0
        file.seek(max(start, size - MAX_TEXT_BYTES))
        data = file.read(MAX_TEXT_BYTES)
        begin = file.tell() - len(data)
    end = data.rfind(b"\n") + 1
    found: list[dict[str, Any]] = []
    for line in data[:end].splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found, begin + end
