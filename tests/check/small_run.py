"""A small run on disk for the tests of checks: a model, data, and its file."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from whet.check.check import checks_of, notes_of
from whet.check.context import CheckContext
from whet.check.findings import Finding
from whet.config import load_config
from whet.quickstart.model import SmallModelConfig, make_model
from whet.settings.rl import RunConfig
from whet.settings.supervised import SupervisedRunConfig

ROWS = [{"prompt": f"What is {i} + {j}?", "label": str(i + j)} for i in range(4) for j in range(3)]
SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
RL = """
num_rollouts = 3
run_dir = "run"
model = { path = "model", device = "cpu" }
data = { train = "train.jsonl" }
batch = { prompts_per_rollout = 4, samples_per_prompt = 2 }
rollout = { max_turns = 2, max_tokens = 96, max_turn_tokens = 16 }
env = { name = "tools", tools = ["calculator"] }
reward = { name = "math" }
train = { max_tokens_per_device = 256 }
engine = { embedded = { cache_tokens = 512 } }
evaluate = { interval = 2, sets = { test = { path = "test.jsonl", limit = 2 } } }
"""
SFT = """
num_steps = 4
samples_per_step = 3
run_dir = "sft"
model = { path = "model", device = "cpu" }
data = { path = "talk.jsonl" }
train = { max_tokens_per_device = 256 }
"""


def write_rows(path: Path, rows) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def make_run(folder: Path) -> Path:
    """Everything that `run.toml` and `sft.toml` name; their paths are relative to the folder."""
    words = [row["prompt"] for row in ROWS] * 2
    make_model(folder / "model", words, SHAPE, seed=0)
    write_rows(folder / "train.jsonl", ROWS)
    write_rows(folder / "test.jsonl", ROWS[:3])
    talks = [[("user", row["prompt"]), ("assistant", row["label"])] for row in ROWS]
    write_rows(folder / "talk.jsonl", [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in talks])
    (folder / "run.toml").write_text(RL)
    (folder / "sft.toml").write_text(SFT)
    return folder


def module(folder: Path, name: str, code: str) -> str:
    """A user's file; returns the path to name it by."""
    (folder / name).write_text(textwrap.dedent(code))
    return str(folder / name)


def look(*areas: str, overrides=(), file: str = "run.toml", calls_tools: bool = False) -> tuple[list[Finding], CheckContext]:
    """What some checks find, run in the table's order; those not named find nothing."""
    config = load_config(SupervisedRunConfig if file == "sft.toml" else RunConfig, Path(file), list(overrides))
    context = CheckContext(config, calls_tools=calls_tools)
    found = [note.of(check.area) for check in checks_of(config) if check.area in areas for note in notes_of(check, context)]
    return found, context


def of(findings, area: str, status: str | None = None) -> list[str]:
    """The texts of an area, with what is shown below them."""
    return ["\n".join((f.text, *f.lines)) for f in findings if f.area == area and status in (None, f.status)]
