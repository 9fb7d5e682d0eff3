"""Check of a start in the run's folder as it is: begin, or resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from whet.build.session import changed_settings
from whet.check.context import CheckContext
from whet.check.findings import Note, fail, ok, skip, warn
from whet.checkpoint.run_state import read_state
from whet.checkpoint.store import CheckpointStore, Saved, find_checkpoint
from whet.config import dump_toml
from whet.model.headers import read_header


def check_resume(context: CheckContext) -> Iterator[Note]:
    """Check that the run can begin or resume."""
    config = context.config
    run_dir = Path(config.run_dir)
    before = run_dir / "config.toml"
    if before.is_file() and (changed := changed_settings(before.read_text(), dump_toml(config))):
        yield warn(f"settings changed since the last start in {run_dir}: {changed}")
    saved = CheckpointStore(run_dir / "checkpoints", config.checkpoint).newest()
    log = run_dir / "metrics.jsonl"
    if saved is None:
        aside = ", the metrics of an earlier start are set aside" if log.is_file() and log.stat().st_size else ""
        yield ok(f"starts afresh: there is no checkpoint in {run_dir}{aside}")
        yield from _begins_with(context)
        return
    done = saved.progress.rollout_id
    whole = context.total if context.total is not None else "?"
    text = f"goes on from {saved.folder} at {context.program.unit} {done} of {whole} (optimizer step {saved.progress.optimizer_step})"
    if context.total is not None and done >= context.total:
        yield warn(f"{text}: nothing is left to train, the model is exported again")
    else:
        yield ok(text)
    yield from _fits(context, saved, log)


def _begins_with(context: CheckContext) -> Iterator[Note]:
    """Report the weights that `checkpoint.restore` takes from another run."""
    chosen = context.config.checkpoint.restore
    if chosen is None:
        return
    saved = find_checkpoint(Path(chosen.path))
    yield ok(f"begins with {', '.join(chosen.parts)} of {saved.folder}")
    if "weights" in chosen.parts and context.model is not None and (odd := _odd_weights(context, saved.folder / "weights.safetensors")):
        yield fail(f"checkpoint.restore.path: {saved.folder} is of another model: {odd}")


def _fits(context: CheckContext, saved: Saved, log: Path) -> Iterator[Note]:
    """Check that the checkpoint is of this model, these data and this log."""
    if context.model is None:
        yield skip("its weights: not compared: needs the model's config.json")
    elif odd := _odd_weights(context, saved.folder / "weights.safetensors"):
        yield fail(f"{saved.folder} is of another model: {odd}; choose another run_dir, or the model and dtype that it was made with")
    state = read_state(saved)
    if context.source is None:
        yield skip("its place in the data: not compared: needs the training rows")
    else:
        try:
            context.source.restore(state["parts"]["data"])
        except ValueError as error:
            yield fail(str(error))
    offset = state["log_offset"]
    content = log.read_bytes() if log.is_file() else b""
    if offset > len(content) or content[:offset][-1:] not in (b"", b"\n"):
        what = f"it is not the file that {saved.folder} was saved with"
        yield fail(f"{log} cannot be cut at byte {offset}, where no line begins: {what}; restore it, or start a new run folder")


def _odd_weights(context: CheckContext, path: Path) -> str:
    """The first difference between a checkpoint's weights and the model's; empty if there is none."""
    assert context.model is not None
    theirs = {name: (tuple(t.shape), t.dtype) for name, t in read_header(path).items()}
    adapter = context.model.adapter
    own = dict(context.model.named_weights()) if adapter is None else adapter.tensors()
    mine = {name: (tuple(t.shape), t.dtype) for name, t in own.items()}
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            return f"{name} is {theirs.get(name, 'not in it')}, the model wants {mine.get(name, 'none of that name')}"
    return ""
