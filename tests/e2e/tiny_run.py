"""A reinforcement learning run of seconds, in this process: a tiny model, four questions, and rewards that vary whatever is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whet.quickstart.model import SmallModelConfig, make_model
from whet.settings.rl import RunConfig

HERE = Path(__file__).parent
QUESTIONS = ["How many pens are 3 and 4?", "What is 12 times 3?", "Ann has 5 apples and eats 2. How many are left?", "What is half of 90?"]
SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)


def make_files(folder: Path, shape: SmallModelConfig = SHAPE) -> None:
    """A model and data."""
    make_model(folder / "model", QUESTIONS * 2, shape, 0)
    rows = [{"prompt": question, "label": str(i)} for i, question in enumerate(QUESTIONS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_config(folder: Path, name: str, **changes: Any) -> RunConfig:
    """Settings of a run in `folder/name`; `changes` replace whole tables, or are merged into them where both are tables."""
    settings: dict[str, Any] = {
        "run_dir": str(folder / name),
        "deterministic": True,
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"train": str(folder / "train.jsonl")},
        "num_rollouts": 4,
        "batch": {"prompts_per_rollout": 2, "samples_per_prompt": 3},
        "rollout": {"max_turn_tokens": 8, "max_tokens": 120},
        "reward": {"name": f"{HERE / 'length_reward.py'}:score"},
        "train": {"optim": {"lr": 1e-2}},
        "checkpoint": {"interval": None},
        "observe": {"display": "none"},
    }
    return RunConfig.model_validate(over(settings, changes))


def over(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings with changes, whose tables are laid over those that there are."""
    tables = {key for key, value in changes.items() if isinstance(value, dict) and isinstance(settings.get(key), dict)}
    return settings | {key: settings[key] | value if key in tables else value for key, value in changes.items()}


def is_measurement(name: str) -> bool:
    """True if a key of `metrics.jsonl` describes the machine (dates, durations, rates, memory, ways of
    weights) and not the training: only such keys differ between two runs of the same settings in
    deterministic mode."""
    if name.startswith("sync/"):
        return name != "sync/probe_nats"
    return name in ("time", "train/mfu") or name.startswith(("time/", "tokens_per_second/", "tflop_per_device_s/", "memory/"))


def metrics_of(run_dir: Path) -> list[dict]:
    """What was logged, without what tells of the machine."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not is_measurement(key)} for line in lines]


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "model/model.safetensors").read_bytes()


def checkpoints_of(run_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in run_dir.glob("checkpoints/*/manifest.json"))
