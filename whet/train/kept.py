"""A batch that could not be learned from, kept on disk with the weights of that moment, so that the step can be done again."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file

from whet.core.batch import TrainBatch
from whet.core.nonfinite import Learner, NonFinite
from whet.model.tensor_files import write_tensors
from whet.observe.inside import check_inside
from whet.train.base import Backend

REASON = "reason.json"
BATCH = "batch.safetensors"
CONFIG = "config.toml"
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Kept:
    """The content of a folder that `keep_batch` wrote."""

    folder: Path
    batch: TrainBatch
    message: str
    """Description of the fault."""
    learner: Learner
    """Learner whose step it was; the kept weights are that model's."""


def keep_batch(folder: Path, error: NonFinite, backend: Backend, config: str) -> None:
    """Write the batch of a failed step, the weights, the configuration and the reason.

    Args:
        folder: a new one.
        error: with its batch.
        backend: backend of the learner whose step it was; it holds the weights that the step began with: a failed step changes none.
        config: the run's settings as TOML.

    Raises:
        OSError: if it cannot be written.
    """
    assert error.batch is not None, "only a step's error has a batch"
    folder.mkdir(parents=True)
    columns = {name: column.cpu().clone() for name, column in error.batch.columns().items()}  # two may be one tensor
    write_tensors(columns, folder / BATCH)
    backend.export(folder / MODEL)
    (folder / CONFIG).write_text(config)
    (folder / REASON).write_text(json.dumps({"message": str(error), "learner": error.learner}, indent=1) + "\n")


def read_kept(folder: Path) -> Kept:
    """Read a folder that `keep_batch` wrote.

    Raises:
        ValueError: if the folder holds no kept batch, or a link.
    """
    missing = [name for name in (REASON, BATCH, CONFIG, MODEL) if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder} is no kept batch: {', '.join(missing)} is missing; a run names it: <run>/nonfinite/batch_<n>")
    check_inside(folder)
    columns = load_file(folder / BATCH)
    unknown = columns.keys() - {field.name for field in fields(TrainBatch)}
    if unknown:
        raise ValueError(f"{folder / BATCH} has columns that this version of whet does not know: {', '.join(sorted(unknown))}")
    reason = json.loads((folder / REASON).read_text())
    return Kept(folder, TrainBatch(**columns), reason["message"], reason["learner"])


def odd_columns(batch: TrainBatch) -> list[str]:
    """The columns of a batch that hold NaN or infinity, with how often and in which samples first."""
    out: list[str] = []
    for name, column in batch.columns().items():
        bad = (~torch.isfinite(column)).nonzero().squeeze(-1)
        if len(bad):
            owners = bad if len(column) == batch.num_samples else batch.sample_of_token[bad]
            out.append(f"{name}: {len(bad)} of {len(column)} entries, samples {owners.unique().tolist()[:5]}")
    return out
