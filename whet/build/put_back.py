"""Files of a run's folder as a start found them: a start that fails before it has played or trained anything puts them back."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from whet.build.run_dirs import ROWS
from whet.env.mcp import listed
from whet.env.sandbox.probe import RECORD
from whet.runfolder.journal import END, FAILURES, LOG, STARTS

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
PLAYED = (METRICS, FAILURES, "rollouts", "evaluations", "checkpoints", "model", "nonfinite")
"""Files and folders to which something comes once a run plays or trains. Empty files do not count."""
REWRITTEN = (CONFIG, END, RECORD, listed.RECORD)
APPENDED = (STARTS, LOG)


@dataclass(frozen=True, slots=True)
class FoundFolder:
    """A run's folder as a start found it."""

    folder: Path
    texts: dict[str, bytes | None]
    """Contents of the files that a start replaces; None: there was none."""
    sizes: dict[str, int]
    """Sizes in bytes of the files that a start adds to; 0: there was none."""
    played: dict[Path, int]
    """Sizes in bytes of what was played and trained, by path."""
    aside: list[tuple[Path, Path]] = field(default_factory=list[tuple[Path, Path]])
    """Files that the start renamed: the path before, and the one afterwards."""

    @property
    def is_of_run(self) -> bool:
        """True if there was a run in it."""
        return self.texts.get(CONFIG) is not None

    def put_back(self) -> None:
        """Give the files back what they had before the start, if it has played and trained nothing. What cannot be written stays."""
        moved = {before for before, _ in self.aside}
        expected = {path: size for path, size in self.played.items() if not moved & {path, *path.parents}}
        if dict(_played(self.folder)) != expected:
            return
        with suppress(OSError):  # a full disk, say, must not take the place of the error that ended the start
            for path, kept in self.aside:
                _remove(path)
                kept.rename(path)
            for name, text in self.texts.items():
                _put(self.folder / name, text)
            for name, size in self.sizes.items():
                _cut(self.folder / name, size)


def found_folder(folder: Path) -> FoundFolder:
    """Contents of a run's folder now. The folder's lock is held."""
    sizes = {name: path.stat().st_size if (path := folder / name).is_file() else 0 for name in APPENDED}
    return FoundFolder(folder, _texts(folder, REWRITTEN), sizes, dict(_played(folder)))


def found_rows(folder: Path, names: Iterable[str]) -> FoundFolder:
    """The rows in a run's folder now that files of these names are to replace."""
    return FoundFolder(folder, _texts(folder, (f"{ROWS}/{name}" for name in names)), {}, dict(_played(folder)))


def _texts(folder: Path, names: Iterable[str]) -> dict[str, bytes | None]:
    return {name: path.read_bytes() if (path := folder / name).is_file() else None for name in names}


def _played(folder: Path) -> Iterator[tuple[Path, int]]:
    """Path and size of each file that holds something played or trained."""
    for top in (folder / name for name in PLAYED):
        for path in (top, *top.rglob("*")):
            if path.is_file() and (size := path.stat().st_size):
                yield path, size


def _put(path: Path, text: bytes | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
    elif not path.is_file() or path.read_bytes() != text:
        path.write_bytes(text)


def _cut(path: Path, size: int) -> None:
    if not size:
        path.unlink(missing_ok=True)
    elif path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)


def _remove(path: Path) -> None:
    """Remove an empty file, or a folder that holds nothing but such."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
