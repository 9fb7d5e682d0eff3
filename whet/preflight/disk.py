"""The run's folder: whether it can be written, whether another process holds it, and whether the disk has room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from whet.observe.records import SCHEMA
from whet.preflight.findings import Note, bytes_text, fail, need, ok, warn
from whet.preflight.memory import checkpoint_bytes
from whet.preflight.scene import Scene
from whet.settings import RunConfig

TEXT_BYTES_PER_TOKEN = 6
"""Of the prompts, replies and answers that a record also holds as text."""


def check_disk(scene: Scene) -> Iterator[Note]:
    """Whether the run's folder can be written, belongs to nobody else, and has room for what the run leaves there."""
    run_dir = Path(scene.config.run_dir)
    there = _existing(run_dir)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield fail(f"run_dir: {run_dir} cannot be written: {error.strerror}; choose another with run_dir=PATH")
        return
    yield ok(f"{run_dir} can be written")
    if holders := processes_with_files_in(run_dir):
        yield fail(f"{run_dir} is held by another process: {'; '.join(holders)}; wait for it, or choose another run_dir")
    yield from _room(scene, run_dir, shutil.disk_usage(there).free)


def _room(scene: Scene, run_dir: Path, free: int) -> Iterator[Note]:
    model = need(scene.model, "the model's config.json")
    one = checkpoint_bytes(model, scene.config.train)
    export = sum(p.nbytes for _, p in model.named_weights())
    count = scene.config.checkpoint.keep + 1
    present = sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    needed = max(one * count - present, 0) + export
    text = f"{count} checkpoints of {bytes_text(one)} (checkpoint.keep + 1) and the exported model of {bytes_text(export)}"
    text += f"; {bytes_text(present)} of them are there, {bytes_text(free)} are free"
    yield ok(text) if needed <= free else fail(f"{text}, which is too little: lower checkpoint.keep, or choose another run_dir")
    if not isinstance(scene.config, RunConfig) or not scene.config.observe.records_every:
        return
    records = record_bytes(scene)
    text = f"records of every token take up to {bytes_text(records)}, if every trajectory is as long as it may be"
    if needed + records <= free:
        yield ok(text)
    else:
        yield warn(f"{text}: more than is left; raise observe.records_every, or watch the disk")


def record_bytes(scene: Scene) -> int:
    """The most that the records of a run take: every trajectory as long as it may be, nothing compressed."""
    config = scene.rl
    plan, total = need(scene.batch, "the batch sizes"), need(scene.total, "the run's length")
    lists = [field.type.field(0).type for field in SCHEMA if field.type.num_fields == 1]
    per_token = sum(values.bit_width for values in lists if values.num_fields == 0) / 8 + TEXT_BYTES_PER_TOKEN
    tokens = -(-total // config.observe.records_every) * plan.prompts_per_rollout * plan.samples_per_prompt * config.rollout.max_tokens
    evaluations = 1 + (total // config.evaluate.interval if config.evaluate.interval else 0) + config.evaluate.before_training
    for name, chosen in config.evaluate.sets.items():
        played = len(scene.rows.get(name, ())) * chosen.samples_per_prompt
        tokens += evaluations * played * chosen.rollout.over(config.rollout).max_tokens
    return round(tokens * per_token)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def processes_with_files_in(folder: Path, proc: Path = Path("/proc")) -> list[str]:
    """Other processes that have files of a folder open, each as its id and command. Empty where there is no /proc to tell."""
    found: list[str] = []
    inside = f"{folder.absolute().resolve()}{os.sep}"
    for process in sorted(proc.glob("[0-9]*")):
        if process.name == str(os.getpid()):
            continue
        try:
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended, or is another user's
            continue
        if any(path.startswith(inside) for path in opened):
            found.append(f"{process.name} ({command[:80]})")
    return found
