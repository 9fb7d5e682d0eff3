"""Does `whet plan --rollouts` predict what runs take? Runs of rollout_control.py beside their simulation.

    python benchmarks/rollout_simulation.py

On an otherwise idle machine. Two synchronous runs of the quickstart's model, of 8 and of 32 prompts, give the times that a
simulation needs (lengths and tools: from the records of the first). The slowdown of trainer and engine while both compute comes from
the update time of a third run, with staleness 1. Everything else of the asynchronous and filtered runs is predicted, and compared.
Figures go to benchmarks/results/rollout_simulation.json.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from machine import RESULTS, machine
from rollout_control import NUM_HELD_OUT, SKIPPED, TIMED_ROLLOUTS, VARIANTS, lines_of, settings, warmed

from whet.plan.rollouts.config import SimulationConfig
from whet.plan.rollouts.simulate import Predicted, simulate
from whet.runs.commands import train
from whet.settings.rl import RunConfig

ROUNDS = 3
LARGE = 32
"""Prompts of the second synchronous run."""


def run_of(variant: str, name: str, prompts: int = 8, *, recorded: bool = False) -> RunConfig:
    config, model = warmed(0, NUM_HELD_OUT)
    config = config.model_copy(update={"num_rollouts": TIMED_ROLLOUTS, "prompts_per_rollout": prompts})
    run = settings(config, model, name, variant, "calculator", evaluated=False)
    observe = {"display": "none", "records": {"every": 1 if recorded else 0}}
    return RunConfig.model_validate({**run.model_dump(exclude_unset=True), "observe": observe})


def measured(variant: str, name: str = "simulated", prompts: int = 8) -> dict[str, float]:
    """A run's seconds per step of each phase."""
    run = run_of(variant, name, prompts)
    train(run)
    steps = lines_of(run)[SKIPPED:]
    whole = sum(step["time/step_s"] for step in steps)
    mean = {key: sum(step.get(key, 0.0) for step in steps) / len(steps) for key in steps[0] if key.startswith("time/")}
    trained = sum(step["time/annotate_s"] + step["time/update_s"] for step in steps)
    return {
        **mean,
        "step_s": whole / len(steps),
        "engine_idle": 1 - sum(step["time/engine_busy_s"] for step in steps) / whole,
        "trainer_idle": 1 - trained / whole,
        "load_average": os.getloadavg()[0],
    }


def of_rounds(variant: str, prompts: int = 8) -> dict[str, float]:
    rows = [measured(variant, prompts=prompts) for _ in range(ROUNDS)]
    return {key: median(row[key] for row in rows) for key in rows[0]}


def simulation(records: Path, variant: str, times: dict[str, Any], prompts: int = 8) -> SimulationConfig:
    return SimulationConfig.model_validate(
        {
            "num_rollouts": TIMED_ROLLOUTS,
            "skip": SKIPPED,
            "batch": {"prompts_per_rollout": prompts, "samples_per_prompt": 8},
            "control": VARIANTS[variant].get("control", {}),
            "max_trajectory_tokens": 224,
            "grain": 1,
            "replies": {"records": str(records)},
            **times,
        }
    )


def engine_times(records: Path, runs: dict[int, dict[str, float]]) -> tuple[float, float]:
    """Seconds of a step and of a request in it, from the busy time of two runs: busy = a steps + b tokens."""
    rows = []
    for prompts, run in runs.items():
        counted = []
        for step_s, per_request in ((1.0, 0.0), (1e-9, 1.0)):
            engine = {"step_s": step_s, "step_s_per_request": per_request, "prefill_tokens_per_s": 1e12, "update_s": 0.0}
            times = {"engine": engine, "trainer": {"step_s": 0.0, "tokens_per_s": 1e12, "driver_s_per_turn": 0.0}}
            found = simulate(simulation(records, "synchronous", times, prompts))
            counted.append(found.step_s * (1 - found.engine_idle))
        rows.append((*counted, run["time/engine_busy_s"]))
    (s1, t1, b1), (s2, t2, b2) = rows
    per_request = max(0.0, (b1 * s2 - b2 * s1) / (t1 * s2 - t2 * s1))
    return (b1 - per_request * t1) / s1, per_request


def calibrated(records: Path, small: dict[str, float], large: dict[str, float], overlapped: dict[str, float]) -> dict[str, Any]:
    """The times of a simulation."""
    step_s, per_request = engine_times(records, {8: small, LARGE: large})
    work = small["time/update_s"] + small["time/annotate_s"]
    besides = small["step_s"] - work - small["time/rollout_s"] - small["time/publish_s"]
    slowdown = max(0.0, overlapped["time/update_s"] / small["time/update_s"] - 1)
    engine = {"step_s": step_s, "step_s_per_request": per_request, "prefill_tokens_per_s": 1e9, "update_s": small["time/publish_s"]}
    trainer = {"tokens_per_s": 1e12, "step_s": work, "other_s": besides, "driver_s_per_turn": 0.0, "shared_slowdown": slowdown}
    low, high = 0.0, 0.01
    for _ in range(12):
        trainer["driver_s_per_turn"] = (low + high) / 2
        found = simulate(simulation(records, "synchronous", {"engine": engine, "trainer": trainer}))
        low, high = (low, trainer["driver_s_per_turn"]) if found.step_s > small["step_s"] else (trainer["driver_s_per_turn"], high)
    return {"engine": engine, "trainer": trainer}


def compared(real: dict[str, float], found: Predicted) -> dict[str, Any]:
    pairs = {name: (real[name], getattr(found, name)) for name in ("step_s", "engine_idle", "trainer_idle")}
    rows: dict[str, Any] = {name: {"real": a, "predicted": b} for name, (a, b) in pairs.items()}
    rows["step_s"]["off_by"] = pairs["step_s"][1] / pairs["step_s"][0] - 1
    for name in ("engine_idle", "trainer_idle"):
        rows[name]["off_by_points"] = pairs[name][1] - pairs[name][0]
    return rows


def main() -> None:
    recorded = run_of("synchronous", "recorded", recorded=True)
    shutil.rmtree(recorded.run_dir, ignore_errors=True)
    train(recorded)
    records = Path(recorded.run_dir)
    real = {variant: of_rounds(variant) for variant in VARIANTS}
    large = of_rounds("synchronous", LARGE)
    times = calibrated(records, real["synchronous"], large, real["staleness 1"])
    out: dict[str, Any] = {"command": "python benchmarks/rollout_simulation.py", "machine": machine(), "rounds": ROUNDS, "times": times}
    out["load_average"] = max(row["load_average"] for row in real.values())
    out["variants"] = {name: compared(row, simulate(simulation(records, name, times))) for name, row in real.items()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rollout_simulation.json").write_text(json.dumps(out, indent=1) + "\n")
    for name, row in out["variants"].items():
        print(name, json.dumps(row))


if __name__ == "__main__":
    main()
