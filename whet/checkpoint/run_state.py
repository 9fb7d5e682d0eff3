"""Saved state of a run: the trainer, the data cursor, random states, counters, the log's offset, and
all other states."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, get_args, runtime_checkable

from whet.background import Background
from whet.checkpoint.config import CheckpointPart
from whet.checkpoint.store import REFERENCE, CheckpointStore, Saved, find_checkpoint
from whet.train.base import Backend
from whet.train.watchdog import RankHung
from whet.types import JSON, Progress

STATE = "state.json"
BINDING = ("config_hash", "code")
"""Facts about a run: what was played before the first update is taken up by a start with the same alone."""
PROOFS = "proofs"
"""Name of the state that a publication changes: that it changed alone is no reason to save."""


@runtime_checkable
class Stateful(Protocol):
    """Something whose state is JSON."""

    def state(self) -> JSON: ...

    def restore(self, state: JSON) -> None:
        """Go on from what `state` gave.

        Raises:
            ValueError: if it is the state of something else.
        """
        ...


class Log(Protocol):
    """A file of lines that can be cut back to where it was."""

    def tell(self) -> int: ...

    def truncate(self, offset: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedModels:
    """The models that a run's checkpoints hold."""

    policy: Backend
    """Weights, optimizer, schedule."""
    others: Mapping[str, Backend] = field(default_factory=dict[str, Backend])
    """Further models, by the names of their folders."""
    renew_reference: Callable[[], None] | None = None
    """Makes the reference among them a copy of the policy, if it has no model of its own."""


class RunState:
    """Saves and resumes a run.

    Args:
        store: the run's checkpoints.
        models: the models in them.
        log: `metrics.jsonl`: lines after the checkpoint's offset are cut at a resume, so that none is
            doubled.
        parts: the states that `checkpoint.restore` names one by one: `data`, `random`.
        others: states that belong to a run as a whole: the last evaluation, an unfinished rollout. A
            new run takes them over from another if `checkpoint.restore` names every part.
        config: the run's configuration as TOML, kept next to the tensors.
        facts: about the run, for the manifest.
        note: shows the user a message about the resume.
    """

    def __init__(
        self,
        store: CheckpointStore,
        models: SavedModels,
        log: Log,
        *,
        parts: Mapping[CheckpointPart, Stateful],
        others: Mapping[str, Stateful],
        config: str,
        facts: Mapping[str, JSON],
        note: Callable[[str], None],
    ) -> None:
        self._store, self._policy, self._log = store, models.policy, log
        self._parts, self._others, self._models = dict(parts), dict(others), dict(models.others)
        self._renew_reference = models.renew_reference
        self._config, self._facts, self._note = config, dict(facts), note
        self._saved: tuple[Progress, JSON] | None = None
        """State in the newest checkpoint, without tensors, even if it is still being written: without a
        change since, nothing is saved."""
        self._background = Background("checkpoint") if store.config.async_save else None
        self._writing: Future[Path] | None = None

    @property
    def best(self) -> str | None:
        """The metric whose best checkpoint is kept."""
        return self._store.config.best

    def resume(self) -> Progress:
        """Go on from the run's newest checkpoint; a run without one begins with what `checkpoint.restore` names, or afresh.

        Raises:
            ValueError: if the checkpoint is damaged, or of another model or other data.
        """
        saved = self._store.newest()
        if saved is None:
            progress = self._begin()
        elif saved.progress == Progress():
            progress = self._begin()
            self._take_up(saved)
        else:
            progress = self._go_on(saved)
        self._saved = replace(progress), reasons(self._others_state())
        return progress

    def due(self, progress: Progress, total: int, metrics: Mapping[str, float]) -> bool:
        """True if a checkpoint is due now; `metrics` are those of the present weights.

        Raises:
            OSError: if writing the previous checkpoint failed meanwhile.
        """
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._store.due(progress.rollout_id, total, metrics) and self._saved != (progress, reasons(self._others_state()))

    def read(self) -> dict[str, JSON]:
        """The present state without tensors, as a checkpoint holds it."""
        parts = {name: part.state() for name, part in self._parts.items()}
        return {"log_offset": self._log.tell(), "parts": parts, "others": self._others_state()}

    def save(self, progress: Progress, metrics: Mapping[str, float], state: dict[str, JSON] | None = None) -> Path | None:
        """Write a checkpoint, unless nothing has changed since the last one; with `async_save` after
        this has returned. It waits for the previous checkpoint.

        Args:
            progress: counters.
            metrics: metrics of these weights.
            state: result of `read`, if the parts change during the writing; None: it is read here.

        Returns:
            Its folder, once it is whole; None: there was nothing to save, or it is still being written
                (`wait`).

        Raises:
            OSError: if it, or the previous one, cannot be written.
        """
        self.wait()
        state = self.read() if state is None else state
        others = reasons(state["others"])
        if self._saved == (progress, others):
            return None
        models, texts = {"": self._policy, **self._models}, {STATE: json.dumps(state), "config.toml": self._config}

        def stage(folder: Path) -> Callable[[], None]:
            each = [
                partial(backend.save, folder / name) if self._background is None else backend.stage(folder / name)
                for name, backend in models.items()
            ]
            return lambda: write_all(folder, each, texts)

        finish = self._store.begin(progress, metrics, self._facts, stage)
        if self._background is not None:
            self._writing = self._background.do(finish)
        folder = finish() if self._background is None else None
        self._saved = replace(progress), others
        return folder

    def wait(self) -> Path | None:
        """Wait until the checkpoint that is being written is whole.

        Returns:
            Its folder; None: none is being written.

        Raises:
            OSError: if it cannot be written; the run's state counts as not saved then.
        """
        writing, self._writing = self._writing, None
        try:
            return None if writing is None else writing.result()
        except BaseException:
            self._saved = None
            raise

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context that finishes the checkpoint being written before any error ends the run; except if a
        process hangs, which would have to write a part.

        Raises:
            OSError: if it cannot be written, and nothing else ended the run.
        """
        try:
            yield
        except RankHung:
            raise
        except BaseException:
            try:
                self.wait()
            except Exception as error:  # whatever it is, it must not hide why the run ends
                self._note(f"the last checkpoint was not written: {error}")
            raise
        self.wait()

    def _others_state(self) -> dict[str, JSON]:
        return {name: other.state() for name, other in self._others.items()}

    def _go_on(self, saved: Saved) -> Progress:
        if lacking := [name for name in self._models if not (saved.folder / name).is_dir()]:
            raise ValueError(
                f"{saved.folder} has no {' and no '.join(lacking)}: it was saved with other settings, so the run cannot go on from it; "
                "choose another run_dir, and begin there with this checkpoint's weights (checkpoint.restore)"
            )
        progress = self._restore(saved, get_args(CheckpointPart))
        self._restore_others(saved)
        self._log.truncate(read_state(saved)["log_offset"])
        self._note(f"resumed from {saved.folder}")
        return progress

    def _take_up(self, saved: Saved) -> None:
        """Go on with what a run had played that was stopped before its first update. It had learned nothing, so it binds nobody: with other
        settings, code or data the run begins afresh. The weights are those that a run begins with."""
        changed = [key.replace("_", " ") for key in BINDING if saved.facts.get(key) != self._facts.get(key)]
        states = {**self._parts, **self._others}
        kept = {name: part.state() for name, part in states.items()}
        try:
            if changed:
                raise ValueError(f"other {' and '.join(changed)}")
            state = read_state(saved)
            found = {**state["parts"], **state["others"]}
            for name, part in states.items():
                if name in found:  # else it is new with the settings, or with whet
                    part.restore(found[name])
            self._log.truncate(state["log_offset"])
        except ValueError as error:
            for name, part in states.items():
                part.restore(kept[name])
            self._log.truncate(0)
            self._note(f"{saved.folder} was saved before the first update, with {error}: the run begins afresh")
        else:
            self._note(f"resumed from {saved.folder}")

    def _begin(self) -> Progress:
        chosen = self._store.config.restore
        if chosen is None:
            return Progress()
        saved = find_checkpoint(Path(chosen.path))
        progress = self._restore(saved, chosen.parts)
        if set(chosen.parts) == set(get_args(CheckpointPart)):
            self._restore_others(saved)
        if REFERENCE in self._models and self._renew_reference is not None and not chosen.goes_on:
            self._renew_reference()
        self._note(f"began with {', '.join(chosen.parts)} of {saved.folder}")
        return progress if chosen.goes_on else Progress()

    def _restore(self, saved: Saved, names: Collection[CheckpointPart]) -> Progress:
        self._policy.load(saved.folder, weights="weights" in names, optimizer="optimizer" in names)
        for name, backend in self._models.items():
            if name == REFERENCE and "counters" not in names:
                continue  # a run that begins has one of its own
            if (saved.folder / name).is_dir():
                backend.load(saved.folder / name, weights="weights" in names, optimizer="optimizer" in names)
            elif "weights" in names:
                self._note(f"{saved.folder} has no {name}: it begins as a new run's does")
        state = read_state(saved)["parts"]
        for name, part in self._parts.items():
            if name in names:
                part.restore(state[name])
        return saved.progress

    def _restore_others(self, saved: Saved) -> None:
        state = read_state(saved)["others"]
        for name, other in self._others.items():
            if name in state:  # else it is new with the settings, and begins afresh
                other.restore(state[name])


def reasons(others: Mapping[str, JSON]) -> dict[str, JSON]:
    """The states whose change is a reason to save."""
    return {name: state for name, state in others.items() if name != PROOFS}


def write_all(folder: Path, models: Sequence[Callable[[], None]], texts: Mapping[str, str]) -> None:
    """Write what models write, and texts by the names of their files."""
    for write in models:
        write()
    for name, text in texts.items():
        (folder / name).write_text(text)


def read_state(saved: Saved) -> dict[str, JSON]:
    """State of a checkpoint without tensors: `parts` and `others` by name, `log_offset`."""
    return json.loads((saved.folder / STATE).read_text())
