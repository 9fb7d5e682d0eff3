"""What controlling rollouts saves, and that it learns all the same: the quickstart's reinforcement learning on the same warmed-up models.

    python benchmarks/rollout_control.py learn [SEED ...]     # accuracy over 1,000 held-out problems, tokens sampled and dropped
    python benchmarks/rollout_control.py time                 # seconds per rollout and idle shares, in alternating rounds
    python benchmarks/rollout_control.py slow [SIZE ...]      # throughput with a tenth of the tool calls sleeping 2 s, beside that without

Nothing is deterministic here: that would forbid overlap. `learn` keeps what it has, run by run, so it can be stopped and goes on,
and several of it can run side by side, each with seeds of its own. Figures go to benchmarks/results/rollout_control.json. The load
average is told: other work on the machine moves every second of `time` and `slow`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from machine import RESULTS, machine
from sleepy_tools import SLEEP_S

from whet.quickstart.run import QuickstartConfig, make_files, rl_config, warmup_config
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig

FILE = RESULTS / "rollout_control.json"
FOLDER = Path("runs/rollout_control")
NUM_HELD_OUT = 1000
ROUNDS = 3
TIMED_ROLLOUTS = 25
SKIPPED = 5
"""First rollouts of a timed run that do not count: the pipeline fills."""
SLOW_PROMPTS = {"quickstart": 8, "large": 64}
"""Prompts of a rollout, by 8 samples: the quickstart's 64 trajectories, which take two thirds of a second, and 512."""
SLOW_ROLLOUTS = {"quickstart": TIMED_ROLLOUTS, "large": SKIPPED + 6}
CORRECTED = {"clip_high": 0.28, "correction": {"weights": "token"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "dynamic sampling": {"control": {"filters": [{"name": "zero_std"}], "over_sample": 1.5}},
    "partial rollouts": {"control": {"over_sample": 1.5, "partial": True, "max_staleness": 2, "overlap": False}, "algo": CORRECTED},
    "staleness 1": {"control": {"max_staleness": 1}, "algo": CORRECTED},
    "staleness 4": {"control": {"max_staleness": 4}, "algo": CORRECTED},
}
LEARNED = ["dynamic sampling", "partial rollouts", "staleness 1", "staleness 4", "synchronous"]
SLEEPY = f"{Path(__file__).parent / 'sleepy_tools.py'}:calculator"


def warmed(seed: int, num_held_out: int, **changes: Any) -> tuple[QuickstartConfig, Path]:
    """The quickstart's sizes and the model that it warmed up; made once."""
    config = QuickstartConfig(seed=seed, run_dir=str(FOLDER / f"seed{seed}"), num_held_out=num_held_out, **changes)
    model = Path(config.run_dir) / "warmup/model"
    if not model.exists():
        make_files(config, Path(config.run_dir))
        train_on_data(warmup_config(config))
    return config, model


def settings(config: QuickstartConfig, model: Path, name: str, variant: str, tool: str, *, evaluated: bool) -> RunConfig:
    """A variant's run in a folder of its own."""
    base = rl_config(config, model, name).model_dump(mode="json", exclude_unset=True)
    changes = {"deterministic": False, "env": {**base["env"], "tools": [tool]}, "observe": {"display": "none", "records": {"every": 0}}}
    if not evaluated:
        changes |= {"evaluate": {}, "checkpoint": {"interval": None}}
    folder = Path(base["run_dir"])
    shutil.rmtree(folder, ignore_errors=True)
    return RunConfig.model_validate({**base, **changes, **VARIANTS[variant]})


def lines_of(config: RunConfig) -> list[dict[str, float]]:
    """The steps that a run logged."""
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "policy/loss" in line or "rollout/tokens" in line]


def learn(seeds: list[int]) -> None:
    for seed in seeds:
        config, model = warmed(seed, NUM_HELD_OUT)
        for variant in LEARNED:
            if any((row["seed"], row["variant"]) == (seed, variant) for row in read().get("learn", [])):
                continue
            row = learned(config, model, variant)
            print(json.dumps(row), flush=True)
            found = read()
            found["learn"] = sorted([*found.get("learn", []), row], key=lambda row: (row["seed"], row["variant"]))
            write(found)


def learned(config: QuickstartConfig, model: Path, variant: str) -> dict[str, Any]:
    """What a whole run came to."""
    run = settings(config, model, f"rl {variant}", variant, "calculator", evaluated=True)
    values = train(run)
    steps = lines_of(run)
    return {
        "seed": config.seed,
        "variant": variant,
        "accuracy": values["eval/held_out/reward/total"],
        "problems": NUM_HELD_OUT,
        "rollouts": len(steps),
        "tokens_trained_on": sum(step["rollout/tokens"] - step["staleness/masked_tokens"] for step in steps),
        "tokens_masked": sum(step["staleness/masked_tokens"] for step in steps),
        "tokens_dropped": sum(step["rollout/dropped_tokens"] for step in steps),
        "mean_age": sum(step.get("staleness/mean", 0.0) for step in steps) / len(steps),
        "machine": machine(),
    }


def timed(variant: str, tool: str, size: str = "quickstart") -> dict[str, float]:
    """Seconds per rollout, and which share of them engine and trainer had nothing to do."""
    config, model = warmed(0, NUM_HELD_OUT)
    config = config.model_copy(update={"num_rollouts": SLOW_ROLLOUTS[size], "prompts_per_rollout": SLOW_PROMPTS[size]})
    run = settings(config, model, "timed", variant, tool, evaluated=False)
    train(run)
    steps = lines_of(run)[SKIPPED:]
    whole = sum(step["time/step_s"] for step in steps)
    busy = sum(step["time/annotate_s"] + step["time/update_s"] for step in steps)
    sampled = sum(step["rollout/tokens"] + step["rollout/dropped_tokens"] for step in steps)
    return {
        "seconds_per_rollout": whole / len(steps),
        "engine_idle": 1 - sum(step["time/engine_busy_s"] for step in steps) / whole,
        "trainer_idle": 1 - busy / whole,
        "tokens_per_second": sampled / whole,
        "trained_tokens_per_second": sum(step["rollout/tokens"] for step in steps) / whole,
        "load_average": os.getloadavg()[0],
    }


def time_all(found: dict[str, Any]) -> None:
    rounds: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(ROUNDS):
        for variant, rows in rounds.items():
            rows.append(timed(variant, "calculator"))
    base = rounds["synchronous"]
    found["time"] = {"machine": machine(), "rounds": ROUNDS, "rollouts": TIMED_ROLLOUTS - SKIPPED, "variants": {}}
    for variant, rows in rounds.items():
        ratios = [a["seconds_per_rollout"] / b["seconds_per_rollout"] for a, b in zip(base, rows, strict=True)]
        medians = {key: median(row[key] for row in rows) for key in rows[0]}
        found["time"]["variants"][variant] = {**medians, "times_as_fast_as_synchronous": median(ratios), "ratios": ratios}
        print(variant, json.dumps(found["time"]["variants"][variant]), flush=True)


def slow(found: dict[str, Any], size: str) -> None:
    of_size: dict[str, Any] = {"machine": machine(), "rounds": ROUNDS, "sleep_s": SLEEP_S, "prompts": SLOW_PROMPTS[size], "variants": {}}
    for variant in ("synchronous", "staleness 1", "staleness 4"):
        pairs = [(timed(variant, "calculator", size), timed(variant, SLEEPY, size)) for _ in range(ROUNDS)]
        kept = [with_["trained_tokens_per_second"] / without["trained_tokens_per_second"] for without, with_ in pairs]
        seconds = median(without["seconds_per_rollout"] for without, _ in pairs)
        load = max(b["load_average"] for _, b in pairs)
        row = {"throughput_kept": median(kept), "ratios": kept, "seconds_per_rollout": seconds, "load_average": load}
        of_size["variants"][variant] = row
        print(size, variant, json.dumps(row), flush=True)
        found.setdefault("slow", {})[size] = of_size
        write(found)


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(found: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    found["command"] = "python benchmarks/rollout_control.py learn|time|slow"
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "learn":
        learn([int(seed) for seed in rest] or [0, 1, 2])
        return
    found = read()
    if what == "time":
        time_all(found)
    else:
        for size in rest or SLOW_PROMPTS:
            slow(found, size)
    write(found)


if __name__ == "__main__":
    main()
