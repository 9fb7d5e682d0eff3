"""Errors of a run's folder and its checkpoints."""

from __future__ import annotations

from tests.errors.error_bench import Bench, Case, Told, together

NEWEST = "checkpoints/rollout_000001"


def unwritable(bench: Bench) -> Told:
    """Below a file there can be no folder, for root neither."""
    return together(
        bench.refused("run_dir=train.jsonl/run"),
        bench.refused("--output", "train.jsonl/records", command="generate"),
    )


def other_model(bench: Bench) -> Told:
    (bench.folder / "other").symlink_to(bench.shared.other_model)
    return bench.refused("model.path=other", "num_rollouts=2")


def other_data(bench: Bench) -> Told:
    bench.file("new.jsonl", (bench.folder / "train.jsonl").read_text().replace("2+3", "3+2"))
    return together(
        bench.refused("data.train=new.jsonl", "num_rollouts=2"),
        bench.refused("data.train=train.jsonl@[:3]", "num_rollouts=2"),
    )


def part_missing(bench: Bench) -> Told:
    path = bench.earlier() / NEWEST / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    short = bench.refused("num_rollouts=2")
    path.unlink()
    return together(short, bench.refused("num_rollouts=2"))


def not_to_resume(bench: Bench) -> Told:
    return bench.refused("checkpoint.resume=false", "num_rollouts=2")


def log_changed(bench: Bench) -> Told:
    path = bench.earlier() / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    return bench.refused("num_rollouts=2")


RUN = (
    Case(
        id="unwritable",
        title="A folder that cannot be written",
        cause="The folder for a run or for records cannot be made or written: its parent is a file, it is read-only, or it is another "
        "user's.",
        remedy="Choose another with `run_dir=PATH` or `--output PATH`.",
        words=("run_dir: train.jsonl/run cannot be written", "run_dir=PATH", "records cannot be written to train.jsonl/records"),
        provoke=unwritable,
        seen_by_check=True,
        check_words=("run_dir: train.jsonl/run cannot be written", "run_dir=PATH"),
    ),
    Case(
        id="checkpoint-of-another-model",
        title="A checkpoint of another model",
        cause="The run's folder holds checkpoints, and the model that the settings name has other tensors than they do.",
        remedy="Go on with the model that the run was started with (`config.toml` has it), or choose another `run_dir`.",
        words=("is of another model", "(268, 16)", "(268, 32)"),
        provoke=other_model,
        seen_by_check=True,
    ),
    Case(
        id="checkpoint-of-other-data",
        title="A checkpoint of other data",
        cause="A checkpoint remembers its place among the rows: how many there are, their order, and the prompts of those that were taken. One of "
        "these has changed since.",
        remedy="Labels, metadata and rows that were not taken yet may be corrected. Else go on with the data of that run, or start afresh in another `run_dir` (with `model.path` set to this run's exported "
        "model, its training is kept).",
        words=("source 'train' was taken over other rows", "length 4, not 3", "another run_dir"),
        provoke=other_data,
        seen_by_check=True,
    ),
    Case(
        id="damaged-checkpoint",
        title="A checkpoint of which a part is missing or cut short",
        cause="Something other than whet changed the checkpoint: whet gives one its name only when it is whole.",
        remedy="Restore the file, or remove the checkpoint's folder; the one before it is used then.",
        words=("weights.safetensors has 1000 bytes", "weights.safetensors is missing", "remove the folder to use the one before"),
        provoke=part_missing,
        seen_by_check=True,
    ),
    Case(
        id="not-to-resume",
        title="Checkpoints, and a run that is not to resume",
        cause="`checkpoint.resume=false` asks for a run from the beginning, and the folder holds checkpoints that it would overwrite.",
        remedy="Choose another `run_dir`, or remove the checkpoints.",
        words=("holds checkpoints and checkpoint.resume is false", "choose another run_dir"),
        provoke=not_to_resume,
        seen_by_check=True,
    ),
    Case(
        id="log-changed",
        title="A log that was changed",
        cause="A checkpoint notes how long `metrics.jsonl` was, so that resuming neither loses nor doubles a line. The file is shorter "
        "now.",
        remedy="Restore the file, or go on in another `run_dir`.",
        words=("metrics.jsonl cannot be cut at byte", "restore it"),
        provoke=log_changed,
        seen_by_check=True,
    ),
)
