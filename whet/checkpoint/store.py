"""Checkpoints of a run: a folder whose manifest is written last, so that a torn one is never taken for whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from whet.checkpoint.config import CheckpointConfig
from whet.files import sync_file, sync_folder, write_durably
from whet.observe.inside import check_inside, open_inside
from whet.train.batching import due
from whet.types import JSON, Progress

MANIFEST = "manifest.json"
FORMAT = 5
NAME = re.compile(r"rollout_(\d{6,})(?:\.(\d+))?")
"""Name of a checkpoint's folder: number of rollouts, and number of earlier checkpoints of the same
rollout."""
REFERENCE = "reference"
"""The folder of a checkpoint that holds the reference's weights, where no other folder has them."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint on disk; every part has been read and has the digest that the manifest names."""

    folder: Path
    progress: Progress
    metrics: Mapping[str, float]
    """Metrics of exactly these weights."""
    facts: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    """About the run that saved it: configuration hash, environment."""


class CheckpointStore:
    """The checkpoints of one run, `rollout_000050`, `rollout_000100` and so on; several of one rollout are `rollout_000050.1` and so on.

    Args:
        folder: folder of the checkpoints, `<run>/checkpoints`.
        config: interval and number of checkpoints.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config
        self._lock = threading.Lock()
        """Held while checkpoints come and go: one may be written on another thread."""

    def due(self, done: int, total: int, metrics: Mapping[str, float]) -> bool:
        """True if a checkpoint is due after `done` of `total` rollouts; `metrics` are the newest ones."""
        if due(done, total, self.config.interval):
            return True
        value = self._score(metrics)
        with self._lock:
            return value is not None and done > 0 and all(value > other for other in self._scores().values())

    def save(
        self,
        progress: Progress,
        metrics: Mapping[str, float],
        facts: Mapping[str, JSON],
        write: Callable[[Path], None],
    ) -> Path:
        """`begin`, with parts that `write` writes into the folder that it is given, and the rest of it at once."""
        return self.begin(progress, metrics, facts, lambda folder: partial(write, folder))()

    def begin(
        self,
        progress: Progress,
        metrics: Mapping[str, float],
        facts: Mapping[str, JSON],
        stage: Callable[[Path], Callable[[], None]],
    ) -> Callable[[], Path]:
        """Write a checkpoint: parts first, manifest last, then the folder gets its name; then old ones
        are removed.

        A crash at any moment leaves the earlier checkpoints; the next save removes the unfinished one.
        A failure to write or remove is an OSError with the reason, the free space, and the checkpoint
        that is whole.

        Args:
            progress: the run's counters.
            metrics: metrics of these weights.
            facts: about the run; `newest` returns them.
            stage: gets the folder for the parts; the function that it returns writes them.

        Returns:
            A function that does the rest, on any thread, before the next checkpoint is started; it
                returns the checkpoint's folder, and raises as this does.

        Raises:
            OSError: if the disk is full or cannot be written; nothing of this checkpoint is left then.
                Or if an old one cannot be removed; the new one is whole then.
        """
        draft = self.folder / f".writing_{progress.rollout_id:06d}"
        progress, metrics, facts = replace(progress), dict(metrics), dict(facts)
        with self._written_or_gone(draft):
            self._remove_drafts()
            draft.mkdir(parents=True)
            write = stage(draft)

        def finish() -> Path:
            with self._written_or_gone(draft):
                write()
                write_manifest(draft, progress, metrics, facts)
                with self._lock:
                    target = self._free_name(progress.rollout_id)
                    os.replace(draft, target)
                sync_folder(self.folder)
            try:
                with self._lock:
                    self._prune()
            except OSError as error:
                raise self._disk_error("an old checkpoint cannot be removed", error) from error
            return target

        return finish

    @contextmanager
    def _written_or_gone(self, draft: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise self._disk_error("a checkpoint cannot be written", error) from error

    def newest(self) -> Saved | None:
        """The newest checkpoint, read and verified, or None.

        Raises:
            ValueError: if there is one and the configuration says not to resume; if a part of it is missing or is not what was
                written: the part is named.
        """
        self.check_resume()
        folders = self._all()
        return read_checkpoint(folders[-1]) if folders else None

    def num_done(self) -> int | None:
        """Number of rollouts, or steps, before the newest checkpoint; None: there is no checkpoint. Its
        parts are not read."""
        folders = self._all()
        return int(_read_manifest(folders[-1])["progress"]["rollout_id"]) if folders else None

    def keeps_reference(self) -> bool:
        """True if checkpoints must hold a reference that begins as the policy's first weights: no
        folder has them if a run began with restored ones. A run with a checkpoint continues as it was
        started, even if `restore` was changed since."""
        folders = self._all()
        if folders:
            return (folders[-1] / REFERENCE).is_dir()
        return self.config.restore is not None and "weights" in self.config.restore.parts

    def check_resume(self) -> None:
        """Check that an existing checkpoint may be continued.

        Raises:
            ValueError: if there is a checkpoint and the configuration says not to resume.
        """
        if self.config.resume is False and self._all():
            advice = "choose another run_dir, or set it to fresh, which renames the folder"
            raise ValueError(f"{self.folder} holds checkpoints and checkpoint.resume is false: {advice}")

    def _remove_drafts(self) -> None:
        """Remove what a crash left half-written."""
        for draft in self.folder.glob(".writing_*"):
            shutil.rmtree(draft)
        for folder in self.folder.glob("rollout_*"):
            if NAME.fullmatch(folder.name) and not (folder / MANIFEST).exists():
                shutil.rmtree(folder)

    def _all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return checkpoints_in(self.folder)

    def _free_name(self, rollout_id: int) -> Path:
        plain = self.folder / f"rollout_{rollout_id:06d}"
        same = [folder for folder in self._all() if _place(folder)[0] == rollout_id]
        return plain.with_name(f"{plain.name}.{_place(same[-1])[1] + 1}") if same else plain

    def _prune(self) -> None:
        """Remove all but the last ones and the best. The manifest goes first: what is half removed is no checkpoint."""
        keep = set(self._all()[-self.config.keep :])
        scores = self._scores()
        if scores:
            keep.add(max(scores, key=lambda folder: (scores[folder], _place(folder))))
        for old in self._all():
            if old not in keep:
                (old / MANIFEST).unlink()
                shutil.rmtree(old)

    def _scores(self) -> dict[Path, float]:
        """The checkpoints with a value of `best`: the higher, the better."""
        if self.config.best is None:
            return {}
        found = {folder: self._score(_read_manifest(folder)["metrics"]) for folder in self._all()}
        return {folder: value for folder, value in found.items() if value is not None}

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        value = None if self.config.best is None else metrics.get(self.config.best)
        return -value if value is not None and self.config.best_mode == "min" else value

    def _disk_error(self, what: str, error: OSError) -> OSError:
        kept = self._all()
        last = f"the newest whole checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free / 2**20
        reason = str(error) if error.errno is None else os.strerror(error.errno)
        where = "" if error.filename is None else f" at {error.filename}"
        text = f"{what}: {reason}{where} ({free:.0f} MiB free); {last}: make room and start the run again"
        return OSError(error.errno, text, str(self.folder))


def write_manifest(folder: Path, progress: Progress, metrics: Mapping[str, float], facts: Mapping[str, JSON]) -> None:
    """Make a folder a checkpoint, once everything else in it is written: every file, its size and its digest.

    Raises:
        OSError: if it cannot be written.
    """
    manifest = {
        "format": FORMAT,
        "progress": asdict(progress),
        "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
        "facts": dict(facts),
        "parts": {name: _describe(folder / name) for name in _files_in(folder)},
    }
    write_durably(folder / MANIFEST, json.dumps({**manifest, "digest": _digest_of(manifest)}, indent=1))
    for written in (*(path for path in folder.rglob("*") if path.is_dir()), folder):  # a file's name is on the disk with its folder
        sync_folder(written)


def find_checkpoint(path: Path) -> Saved:
    """The checkpoint that a path names: a checkpoint's own folder, or the newest of a run's folder.

    Raises:
        ValueError: if there is no checkpoint, or it is damaged.
    """
    if (path / MANIFEST).is_file():
        return read_checkpoint(path)
    for below in (path / "checkpoints", *(path / "checkpoints").glob("rollout_*")):
        if below.is_symlink():
            raise ValueError(f"{below} is a link, and no link in a run's folder is followed: name the checkpoint's own folder")
    store = CheckpointStore(path / "checkpoints", CheckpointConfig())
    saved = store.newest()
    if saved is None:
        raise ValueError(f"checkpoint.restore.path: {path} is no checkpoint, nor the folder of a run that has one")
    return saved


def read_checkpoint(folder: Path) -> Saved:
    """A checkpoint, once every part was found to be what was written, and to lie in the folder itself.

    Raises:
        ValueError: naming the part that is missing, of another size or damaged, or a link.
    """
    check_inside(folder)
    manifest = _read_manifest(folder)
    for name, part in manifest["parts"].items():
        try:
            with open_inside(folder, name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != part["size_bytes"]:
                    raise _damaged(folder, f"{name} has {size} bytes, not {part['size_bytes']}")
                if hashlib.file_digest(file, "sha256").hexdigest() != part["digest"]:
                    raise _damaged(folder, f"{name} has other contents than were written")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _damaged(folder, f"{name} is missing") from error
    return Saved(folder, Progress(**manifest["progress"]), manifest["metrics"], manifest["facts"])


def _read_manifest(folder: Path) -> dict[str, JSON]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{MANIFEST} is no JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise _damaged(folder, f"{MANIFEST} is not a JSON object")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {manifest.get('format')}; this version of whet reads format {FORMAT}")
    if manifest.pop("digest", None) != _digest_of(manifest):
        raise _damaged(folder, f"{MANIFEST} has other contents than were written")
    return manifest


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"checkpoint {folder} is damaged: {what}; remove the folder to use the one before")


def checkpoints_in(folder: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first. What has a name of somebody else's, such as a copy that is to be kept, is none of them."""
    return sorted((path.parent for path in folder.glob(f"rollout_*/{MANIFEST}") if NAME.fullmatch(path.parent.name)), key=_place)


def _place(folder: Path) -> tuple[int, int]:
    """Order of a checkpoint among the others: its rollout, then the number of earlier checkpoints of
    that rollout."""
    found = NAME.fullmatch(folder.name)
    assert found is not None, "only what has a checkpoint's name is asked about"
    return int(found[1]), int(found[2] or 0)


def _files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _describe(path: Path) -> dict[str, JSON]:
    """A part's size and digest, once it is on the disk for good."""
    sync_file(path)
    return {"size_bytes": path.stat().st_size, "digest": _file_digest(path)}


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(manifest: Mapping[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
