"""Preference data on disk and runs of seconds on them: a tiny random model is to prefer one of two words, whatever the question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.tiny_run import QUESTIONS, SHAPE
from whet.quickstart.model import SmallModelConfig, make_model

GOOD, BAD = "Yes, thank you.", "No, go away!"


def make_pairs(folder: Path, *, flipped: bool = False, shape: SmallModelConfig = SHAPE) -> None:
    """A model, training pairs and held-out ones, which are never flipped."""
    make_model(folder / "model", [*QUESTIONS, GOOD, BAD] * 2, shape, 0)
    names = ("rejected", "chosen") if flipped else ("chosen", "rejected")
    write(folder / "pairs.jsonl", [{"prompt": q, names[0]: GOOD, names[1]: BAD} for q in QUESTIONS[:3]])
    write(folder / "held.jsonl", [{"prompt": QUESTIONS[3], "chosen": GOOD, "rejected": BAD}])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pair_settings(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Settings of a run on the pairs in `folder/name`; `changes` replace whole tables."""
    return {
        "run_dir": str(folder / name),
        "deterministic": True,
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"path": str(folder / "pairs.jsonl"), "prompt_key": "prompt"},
        "evaluate": {"path": str(folder / "held.jsonl"), "interval": 4},
        "num_steps": 8,
        "pairs_per_step": 3,
        "train": {"optim": {"lr": 3e-3}, "max_tokens_per_device": 100},
        "checkpoint": {"interval": 3},
        "observe": {"display": "none"},
        **changes,
    }
