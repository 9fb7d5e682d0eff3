"""The run's folder: whether it can be written, whether another process holds it, and whether the disk has room."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from whet.check.context import Scene
from whet.check.findings import Note, fail, need, ok, warn
from whet.check.saved import checkpoint_sizes
from whet.observe.records import SCHEMA
from whet.plan.memory import trained_weights
from whet.plan.text import bytes_text
from whet.runfolder.lock import FolderInUse, owner_of

TEXT_BYTES_PER_TOKEN = 6
"""Of the prompts, replies and answers that a record also holds as text."""
CRITIC_BYTES_PER_TOKEN = 8
"""Of the values and returns that a record holds where there is a critic."""


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
    owner = owner_of(run_dir)
    if owner is not None:
        yield fail(str(FolderInUse(run_dir, owner)))
    yield from _room(scene, run_dir, shutil.disk_usage(there).free)


def _room(scene: Scene, run_dir: Path, free: int) -> Iterator[Note]:
    model = need(scene.model, "the model's config.json")
    parallel = scene.config.train.parallel
    spread = parallel is not None and (parallel == "auto" or parallel.num_ranks > 1)
    one = sum(checkpoint_sizes(scene, model, spread=spread).values())
    export = sum(p.nbytes for p in trained_weights(model).values())
    lora = scene.config.train.lora
    if lora is not None and lora.export_merged:
        export += sum(p.nbytes for _, p in model.named_weights())
    keeps = scene.config.checkpoint
    count = keeps.keep + 1 + (keeps.best is not None)
    present = sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    needed = max(one * count - present, 0) + export
    what = f"{count} checkpoints of {bytes_text(one)} (with one that is being written) and the exported model of {bytes_text(export)}"
    text = f"{what}; {bytes_text(present)} of them are there, {bytes_text(free)} are free"
    yield ok(text) if needed <= free else fail(f"{text}, which is too little: lower checkpoint.keep, or choose another run_dir")
    if scene.program.unit == "step" or not scene.config.observe.records_every:
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
    recorded = -(-total // config.observe.records_every)
    tokens = recorded * plan.prompts_per_rollout * scene.played_per_prompt * config.rollout.max_tokens
    evaluations = 1 + (total // config.evaluate.interval if config.evaluate.interval else 0) + config.evaluate.before_training
    evaluated = 0
    for name, chosen in config.evaluate.sets.items():
        played = len(scene.rows.get(name, ())) * chosen.samples_per_prompt
        evaluated += evaluations * played * chosen.rollout.over(config.rollout).max_tokens
    critic = CRITIC_BYTES_PER_TOKEN if scene.beside is not None and scene.beside.critic is not None else 0
    return round((tokens + evaluated) * per_token + tokens * critic)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
