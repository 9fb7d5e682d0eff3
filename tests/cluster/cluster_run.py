"""A run of seconds for a job: a tiny model, four questions, rewards that vary whatever is written; and its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from whet.config import dump_toml
from whet.observe.trackers import is_measurement
from whet.quickstart.model import SmallModelConfig, make_model
from whet.settings import RunConfig

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["How many pens are 3 and 4?", "What is 12 times 3?", "Ann has 5 apples and eats 2. How many are left?", "What is half of 90?"]
SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48)


def make_files(folder: Path) -> None:
    make_model(folder / "model", QUESTIONS * 2, SHAPE, 0)
    rows = [{"prompt": question, "label": str(i)} for i, question in enumerate(QUESTIONS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(folder: Path, name: str, **changes: Any) -> RunConfig:
    settings = {
        "run_dir": str(folder / name),
        "deterministic": True,
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"train": str(folder / "train.jsonl")},
        "num_rollouts": 3,
        "batch": {"prompts_per_rollout": 2, "samples_per_prompt": 3},
        "rollout": {"max_turn_tokens": 8, "max_tokens": 120},
        "reward": {"name": f"{ROOT / 'tests/e2e/length_reward.py'}:score"},
        "checkpoint": {"interval": None},
        "observe": {"display": "plain"},
        "train": {"optim": {"lr": 1e-3}, "max_tokens_per_device": 64},
    }
    for key, value in changes.items():
        settings[key] = {**settings[key], **value} if isinstance(value, dict) and isinstance(settings.get(key), dict) else value
    return RunConfig.model_validate(settings)


def metrics_of(folder: Path, name: str) -> list[dict[str, float]]:
    """What was logged, without what tells of the machine or of which samples shared a row."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not is_measurement(key) and key != "train/shared"} for line in lines]


def begin(config: RunConfig, **environment: str) -> subprocess.Popen[str]:
    """`whet train`, in a process of its own."""
    path = Path(config.run_dir).with_suffix(".toml")
    path.write_text(dump_toml(config))
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "whet", "train", str(path)]
    return subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(run: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str, str]:
    """Exit status, output and errors. Whatever is still there of it afterwards is ended."""
    family = family_of(run.pid)
    try:
        out, err = run.communicate(timeout=timeout_s)
    finally:
        for process in [*family, *family_of(run.pid)]:
            if process.is_running():
                process.kill()
    return run.returncode, out, err


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all that it started, with what those started."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rank_of(family: list[psutil.Process], rank: int) -> psutil.Process:
    """The process of a rank."""
    found = [p for p in family if "whet.rank" in p.cmdline() and p.environ().get("RANK") == str(rank)]
    assert len(found) == 1, f"{len(found)} processes are rank {rank}"
    return found[0]


def wait_for_lines(path: Path, count: int, run: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Until so many steps are logged."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or path.read_text().count("\n") < count:
        assert run.poll() is None, f"the run ended: {run.communicate()}"
        assert time.monotonic() < deadline, f"{path} has no {count} lines after {timeout_s} s"
        time.sleep(0.05)
