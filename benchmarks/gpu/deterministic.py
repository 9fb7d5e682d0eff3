"""A GRPO run with `deterministic = true`, twice: the same tokens, the same log-probs and the same weights, to the bit.

It has a process of its own, since how cuBLAS computes is settled when a process first uses it. What it runs is that of `gpu.grpo`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpo_step
import torch

from gpu.grpo import SIZES, prepare
from gpu.record import Case
from whet.observe.records import ROLLOUTS, read_records

LAYERS = 4
"""Of the model: a whole one's checkpoints have gigabytes."""
SAMPLED = ("trajectory", "tokens", "logprobs", "train_logprobs", "advantages")
"""Columns that tell what was sampled, and what the trainer made of it."""


def cases(sizes: str, device: torch.device) -> list[Case]:
    return [Case("a step, twice", lambda: twice(sizes, device))]


def twice(sizes: str, device: torch.device) -> Mapping[str, Any]:
    """Both runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    has = SIZES[sizes]
    with tempfile.TemporaryDirectory(prefix="whet-deterministic-") as name:
        folder = Path(name)
        prepare(folder / "model", has.shape, folder, num_hidden_layers=LAYERS)
        tokens = min(has.place.new_tokens, 48)
        place = replace(has.place, folder=folder, device=str(device), steps=1, new_tokens=tokens, changes={"deterministic": True})
        try:
            found = [bits(folder / "model", place) for _ in range(2)]
        finally:
            torch.use_deterministic_algorithms(False)
    differ = sorted(name for name in found[0].keys() | found[1].keys() if found[0].get(name) != found[1].get(name))
    assert not differ, f"two deterministic runs differ in {', '.join(differ)}"
    return {"equal": sorted(found[0])}


def bits(model: Path, place: grpo_step.Place) -> dict[str, str]:
    """Digests of what a run sampled, and of the weights and the optimizer that it ended with."""
    grpo_step.whet_steps(model, place)
    run = place.folder / "whet"
    files = sorted(run.rglob("*.safetensors"))
    assert files, "the run left no weights"
    out = {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    rows = [row for path in sorted((run / ROLLOUTS).glob("*.parquet")) for row in read_records(path)]
    assert rows, "the run recorded no rollout"
    for column in SAMPLED:
        told = repr(sorted((row["task_id"], row["trajectory"], row["order"], row[column]) for row in rows))
        out[column] = hashlib.sha256(told.encode()).hexdigest()
    return out
