"""Seconds of a whole GRPO step (sampling, rewards, log-probs, update): whet beside TRL's GRPOTrainer, in alternating rounds.

    python benchmarks/grpo_step.py 3M        # with a Python that has trl and whet; trl is no dependency of whet

The same folder of random weights (Qwen3's shape, float32), the same prompts, 8 prompts x 8 samples of up to 256 tokens at temperature 1, a
reward that varies whatever is written, no KL, one optimizer step for each rollout. TRL runs with use_cpu, in float32, without gradient
checkpointing (whet has none either). The first step of each round warms up and is left out. Figures go to
benchmarks/results/grpo_step.json: medians of the steps, and of the rounds' ratios. `--more` keeps the rounds that are there and adds to
them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import RESULTS, machine

from whet.quickstart.model import SmallModelConfig, make_model
from whet.runs.commands import train
from whet.settings.rl import RunConfig

FILE = RESULTS / "grpo_step.json"
FOLDER = Path("runs/grpo_step")
LIMIT_S = 540
STEPS = 3
PROMPTS = [f"What is {a} times {b}, and how would you explain it to a child?" for a in range(2, 10) for b in range(11, 15)]
SHAPES = {
    "3M": SmallModelConfig(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=768),
    "38M": SmallModelConfig(hidden_size=512, num_layers=12, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=1536),
}
TRL_BATCH = {"3M": (64, 1), "38M": (16, 4)}
"""Samples per backward pass, and passes per step: what fits in memory."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where steps are taken, and how large they are."""

    folder: Path = FOLDER
    """It has the prompts, `train.jsonl`."""
    device: str = "cpu"
    dtype: str = "float32"
    steps: int = STEPS
    new_tokens: int = 256
    prompts: int = 8
    """Of a step, with 8 samples each."""
    changes: dict[str, Any] = field(default_factory=dict)
    """To whet's settings."""


def whet_steps(model: Path, place: Place = Place()) -> list[dict[str, float]]:
    """Seconds of each step, as the run logs them."""
    run = place.folder / "whet"
    shutil.rmtree(run, ignore_errors=True)
    config = RunConfig.model_validate(
        {
            "run_dir": str(run),
            "model": {"path": str(model), "device": place.device, "dtype": place.dtype},
            "data": {"train": str(place.folder / "train.jsonl")},
            "num_rollouts": place.steps,
            "batch": {"prompts_per_rollout": place.prompts, "samples_per_prompt": 8},
            "rollout": {"max_turn_tokens": place.new_tokens, "max_tokens": place.new_tokens + 144},
            "reward": {"name": f"{Path(__file__).with_name('reply_length.py')}:score"},
            "train": {"optim": {"lr": 1e-6}},
            "checkpoint": {"interval": None},
            "observe": {"display": "none"},
            **place.changes,
        }
    )
    train(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{"seconds": line["time/step_s"], "rollout": line["time/rollout_s"], "update": line["time/update_s"]} for line in lines]


def trl_steps(model: Path, batch: tuple[int, int], place: Place = Place()) -> list[dict[str, float]]:
    """The same by TRL's trainer: a step begins with its sampling."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append({"seconds": time.perf_counter() - self.began})

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [len(reply[0]["content"]) % 7 / 7 for reply in completions]

    samples, passes = batch
    config = GRPOConfig(
        output_dir=str(place.folder / "trl"),
        use_cpu=place.device == "cpu",
        bf16=place.dtype == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=passes,
        num_generations=8,
        max_completion_length=place.new_tokens,
        max_steps=place.steps,
        learning_rate=1e-6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS])
    GRPOTrainer(str(model), reward, args=config, train_dataset=rows, callbacks=[Clock()]).train()
    return seconds


def measure(size: str, rounds: list[dict[str, Any]], count: int) -> None:
    """Add rounds, as many as fit in the time."""
    model = FOLDER / size
    make_model(model, PROMPTS * 2, SHAPES[size], 0)
    (FOLDER / "train.jsonl").write_text("".join(json.dumps({"prompt": text, "label": ""}) + "\n" for text in PROMPTS))
    began, last = time.monotonic(), 0.0
    for _ in range(count):
        started = time.monotonic()
        if started - began + last > LIMIT_S:
            return
        load = round(os.getloadavg()[0], 1)
        rounds.append({"load_average": load, "whet": whet_steps(model)[1:], "trl": trl_steps(model, TRL_BATCH[size])[1:]})
        print(size, rounds[-1], flush=True)
        last = time.monotonic() - started


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians."""
    each = {who: [median(step["seconds"] for step in found[who]) for found in rounds] for who in ("whet", "trl")}
    ratios = [theirs / mine for mine, theirs in zip(each["whet"], each["trl"], strict=True)]
    return {
        "median_step_s": {who: round(median(seconds), 2) for who, seconds in each.items()},
        "median_whet_s": {part: round(median(s[part] for found in rounds for s in found["whet"]), 2) for part in ("rollout", "update")},
        "trl_over_whet": {"median": round(median(ratios), 2), "least": round(min(ratios), 2), "most": round(max(ratios), 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="a GRPO step, side by side")
    parser.add_argument("size", nargs="+", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--more", action="store_true", help="keep the rounds that the file has")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    FOLDER.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(FILE.read_text())["sizes"] if FILE.exists() else {}
    for size in args.size:
        rounds = found[size]["rounds"] if args.more and size in found else []
        measure(size, rounds, args.rounds)
        found[size] = {"machine": machine() | {"trl": version("trl")}, **summary(rounds), "rounds": rounds}
        out = {"command": "python benchmarks/grpo_step.py SIZE", "trl_batch": TRL_BATCH, "sizes": found}
        FILE.write_text(json.dumps(out, indent=1) + "\n")
        print(json.dumps(summary(rounds), indent=1))


if __name__ == "__main__":
    main()
