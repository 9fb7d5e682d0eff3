"""The quickstart with a real pretrained model: SmolLM2-135M-Instruct learns to add, by GRPO alone."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.build.parts import write_summary
from whet.config import Config
from whet.files import replace_file
from whet.model.packaged import MODELS, get_model
from whet.observe.build_display import build_display
from whet.observe.records import read_records
from whet.quickstart.run import note_settings
from whet.runfolder.lock import claim
from whet.runs.commands import train
from whet.settings.rl import RunConfig
from whet.types import JSON

HELD_OUT_SHARE = 0.1
TRAIN = "train"
PROMPT = "What is {a} + {b}? Answer with the number only."


class PretrainedQuickstartConfig(Config):
    """The sizes of the quickstart with a pretrained model."""

    seed: int = 0
    """Seed of the problems and the training."""
    run_dir: str = "runs/quickstart-smollm2-seed0"
    """Folder of everything that it writes but the model, whose folder is in the same parent folder."""
    num_rollouts: int = 20
    """Rollouts of 8 problems with 8 replies each."""
    num_held_out: int = 100
    """Problems of the evaluation, none of which is in training."""

    @property
    def model(self) -> Path:
        """Folder of the model that it begins with; other seeds begin with the same."""
        return Path(self.run_dir).parent / "models/smollm2"


def run_pretrained(
    config: PretrainedQuickstartConfig, summary: Path | None = None, command: str = "whet quickstart --model smollm2"
) -> dict[str, JSON]:
    """Get the model, evaluate it, train it, evaluate it again, and print figures and replies.

    Args:
        config: the sizes.
        summary: file for the results, in JSON; None: `<run_dir>/summary.json` alone.
        command: what was typed; the same goes on with a run that was stopped.

    Returns:
        seed, accuracy_before, accuracy_after, seconds, run_dir, resumed (then the seconds are those since the last start).

    Raises:
        ValueError: the folder holds a quickstart with other settings, or the model cannot be had.
    """
    began = time.perf_counter()
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if summary is not None:
        write_summary(summary, {})  # a path that cannot be written fails now, not after minutes
    with claim(run_dir, command):
        display = build_display("plain", ())
        display.note(f"{MODELS['smollm2'].title}: {config.model}")
        resumed = note_settings(run_dir, config)
        get_model("smollm2", config.model)
        for name, rows in problems(config).items():
            replace_file(run_dir / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        after = train(pretrained_config(config), command)
        results: dict[str, JSON] = {
            "seed": config.seed,
            "accuracy_before": first_accuracy(run_dir / "rl"),
            "accuracy_after": after[ACCURACY],
            "seconds": time.perf_counter() - began,
            "run_dir": str(run_dir),
            "resumed": resumed,
        }
        for path in (run_dir / "summary.json", summary):
            if path is not None:
                write_summary(path, results)
        accuracies = [("before", results["accuracy_before"]), ("after", results["accuracy_after"])]
        display.table(f"quickstart, SmolLM2-135M-Instruct, seed {config.seed}: held-out accuracy", ("", "accuracy"), accuracies)
        for when, replies in replies_of(run_dir / "rl").items():
            display.note(f"replies of the {when} rollout:")
            for prompt, reply in replies:
                display.note(f"  {prompt}  →  {reply!r}")
        display.note(f"{results['seconds']:.0f} s; model, metrics and every token: {run_dir / 'rl'}")
        display.close()
    return results


ACCURACY = "eval/held_out/reward/total"


def problems(config: PretrainedQuickstartConfig) -> dict[str, list[dict[str, JSON]]]:
    """Rows to train on, and others to evaluate with: sums of two numbers of two digits."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(config.seed).shuffle(pairs)
    found: dict[str, list[dict[str, JSON]]] = {TRAIN: [], "held_out": []}
    for a, b in pairs:
        side = "held_out" if zlib.crc32(f"{a}+{b}".encode()) % 1000 < HELD_OUT_SHARE * 1000 else TRAIN
        found[side].append({"prompt": PROMPT.format(a=a, b=b), "label": a + b})
    return {**found, "held_out": found["held_out"][: config.num_held_out]}


def pretrained_config(config: PretrainedQuickstartConfig) -> RunConfig:
    """The run as `whet train` reads it."""
    run_dir = Path(config.run_dir)
    return RunConfig.model_validate(
        {
            "run_dir": str(run_dir / "rl"),
            "seed": config.seed,
            "model": {"path": str(config.model)},
            "num_rollouts": config.num_rollouts,
            "data": {"train": str(run_dir / f"{TRAIN}.jsonl")},
            "batch": {"prompts_per_rollout": 8, "samples_per_prompt": 8},
            "rollout": {"max_turn_tokens": 12, "max_tokens": 96},
            "reward": {"name": "math", "options": {"extract": "last_number"}},
            "algo": {"name": "grpo", "clip_high": 0.28},
            "train": {"optim": {"lr": 1e-5}},
            "evaluate": {"before_training": True, "sets": {"held_out": {"path": str(run_dir / "held_out.jsonl")}}},
        }
    )


def first_accuracy(run_dir: Path) -> float:
    """Held-out accuracy before training."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return next(line[ACCURACY] for line in lines if ACCURACY in line)


def replies_of(run_dir: Path) -> dict[str, list[tuple[str, str]]]:
    """Some prompts and replies of the first and of the last rollout."""
    files = sorted((run_dir / "rollouts").glob("*.parquet"))
    return {when: list(_shown(read_records(path)))[:4] for when, path in (("first", files[0]), ("last", files[-1]))}


def _shown(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """One reply to each prompt."""
    seen = set[str]()
    for row in rows:
        if row["task_id"] not in seen and row["turns"]:
            seen.add(row["task_id"])
            yield row["prompt"][-1]["content"], row["turns"][0]["content"]
