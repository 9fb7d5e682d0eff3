"""Checks of the run's folder: it can be written, no other process holds it, and the disk has room."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from whet.check.context import CheckContext
from whet.check.findings import Note, fail, need, ok, warn
from whet.check.saved import checkpoint_sizes
from whet.observe.records import COMPUTED, SAMPLED
from whet.plan.memory import trained_weights
from whet.plan.text import bytes_text
from whet.runfolder.lock import FolderInUse, owner_of

TEXT_BYTES_PER_TOKEN = 6
"""Bytes per token of prompts, replies and answers, which a record also holds as text."""
CRITIC = ("values", "returns", "td_errors")
"""Columns of a record that a critic fills."""
OTHERS = ("ref_logprobs", "teacher_logprobs", "token_rewards", "kl_rewards", "first_correction", "last_correction")
"""Columns that few runs fill."""


def check_disk(context: CheckContext) -> Iterator[Note]:
    """Check that the run's folder can be written, is free, and has room for all files of the run."""
    run_dir = Path(context.config.run_dir)
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
    yield from _room(context, run_dir, shutil.disk_usage(there).free)


def _room(context: CheckContext, run_dir: Path, free: int) -> Iterator[Note]:
    model = need(context.model, "the model's config.json")
    parallel = context.config.train.parallel
    spread = parallel is not None and (parallel == "auto" or parallel.num_ranks > 1)
    one = sum(checkpoint_sizes(context, model, spread=spread).values())
    export = sum(p.nbytes for p in trained_weights(model).values())
    lora = context.config.train.lora
    if lora is not None and lora.export_merged:
        export += sum(p.nbytes for _, p in model.named_weights())
    keeps = context.config.checkpoint
    count = keeps.keep + 1 + (keeps.best is not None)
    present = sum(path.stat().st_size for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    needed = max(one * count - present, 0) + export
    what = f"{count} checkpoints of {bytes_text(one)} (with one that is being written) and the exported model of {bytes_text(export)}"
    text = f"{what}; {bytes_text(present)} of them are there, {bytes_text(free)} are free"
    yield ok(text) if needed <= free else fail(f"{text}, which is too little: lower checkpoint.keep, or choose another run_dir")
    if context.program.unit == "step" or not context.config.observe.records.every:
        return
    records = record_bytes(context)
    text = f"records of every token take up to {bytes_text(records)}, if every trajectory is as long as it may be"
    if needed + records <= free:
        yield ok(text)
    else:
        yield warn(f"{text}: more than is left; raise observe.records.every, set observe.records.keep, or watch the disk")


def record_bytes(context: CheckContext) -> int:
    """Largest size of a run's records in bytes: every trajectory as long as it may be, nothing compressed."""
    config = context.rl
    plan, total = need(context.batch, "the batch sizes"), need(context.total, "the run's length")
    bits = {name: kind.bit_width for name, kind in {**SAMPLED, **COMPUTED}.items()}
    sampled = sum(bits[name] for name in SAMPLED) / 8 + TEXT_BYTES_PER_TOKEN
    critic = context.auxiliary is not None and context.auxiliary.critic is not None
    empty = {*OTHERS, *(() if critic else CRITIC), *(name for name in COMPUTED if name.startswith("last_") and plan.epochs == 1)}
    computed = sum(bits[name] for name in COMPUTED if name not in empty) / 8
    retention, played = config.observe.records, plan.prompts_per_rollout * context.played_per_prompt
    recorded = min(-(-total // retention.every), total if retention.keep is None else retention.keep)
    full = played if retention.trajectories is None else min(played, retention.trajectories)
    tokens = recorded * full * context.fitted(config.rollout).max_tokens
    evaluations = 1 + (total // config.evaluate.interval if config.evaluate.interval else 0) + config.evaluate.before_training
    evaluated = 0
    for name, chosen in config.evaluate.sets.items():
        played = len(context.rows.get(name, ())) * chosen.samples_per_prompt
        evaluated += evaluations * played * context.fitted(chosen.rollout.over(config.rollout)).max_tokens
    return round((tokens + evaluated) * sampled + tokens * computed)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
