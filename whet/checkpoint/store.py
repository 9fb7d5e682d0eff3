"""Checkpoints of a run: a folder whose manifest is written last, so that a torn one is never taken for whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import Field

from whet.config import Config
from whet.types import JSON, Progress

MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointConfig(Config):
    """When to save, and what to keep."""

    interval: int | None = Field(default=50, gt=0)
    """Save after every so many rollouts (or steps of supervised training), and at the end; none: only at the end."""
    keep: int = Field(default=2, gt=0)
    """Checkpoints that stay on disk; older ones are removed."""
    resume: bool = True
    """Go on from the newest checkpoint in the run's folder, if there is one; false: refuse such a folder."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk."""

    folder: Path
    progress: Progress
    state: Mapping[str, JSON]
    """What else was handed to `save`: the data cursor, the log's offset, the last evaluation."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they lie, `<run>/checkpoints`.
        config: when and how many.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config

    def due(self, done: int, total: int) -> bool:
        """Whether to save after `done` of `total` rollouts."""
        return done == total or (self.config.interval is not None and done % self.config.interval == 0)

    def save(self, progress: Progress, state: Mapping[str, JSON], write: Callable[[Path], None]) -> Path:
        """Write a checkpoint: parts first, manifest last, then the folder gets its name; then old ones go.

        Args:
            progress: the run's counters.
            state: JSON that `newest` gives back.
            write: writes the tensors into the folder that it is given.
        """
        target = self.folder / f"rollout_{progress.rollout_id:06d}"
        draft = self.folder / f".writing_{progress.rollout_id:06d}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write(draft)
        parts = {
            str(path.relative_to(draft)): path.stat().st_size for path in sorted(draft.rglob("*")) if path.is_file()
        }
        manifest = {"format": FORMAT, "progress": asdict(progress), "state": dict(state), "parts": parts}
        with open(draft / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft, target)
        for old in self._all()[: -self.config.keep]:
            shutil.rmtree(old)
        return target

    def newest(self) -> Saved | None:
        """The newest whole checkpoint, or None.

        Raises:
            ValueError: if there is one and the configuration says not to resume; if a part of it is missing or has another size than
                the manifest says: the part is named.
        """
        folders = self._all()
        if not folders:
            return None
        folder = folders[-1]
        if not self.config.resume:
            advice = "choose another run_dir, or remove the folder"
            raise ValueError(f"{self.folder} holds checkpoints and checkpoint.resume is false: {advice}")
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except ValueError as error:
            what = f"{MANIFEST} is no JSON ({error})"
            raise ValueError(f"checkpoint {folder} is damaged: {what}; remove the folder to use the one before") from error
        if manifest["format"] != FORMAT:
            raise ValueError(f"{folder} has checkpoint format {manifest['format']}; this version of whet reads format {FORMAT}")
        for name, size in manifest["parts"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
                what = f"{name} is {found}, expected {size} bytes"
                raise ValueError(f"checkpoint {folder} is damaged: {what}; remove the folder to use the one before")
        return Saved(folder, Progress(**manifest["progress"]), manifest["state"])

    def _all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"rollout_*/{MANIFEST}"))
