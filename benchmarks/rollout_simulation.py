"""Does `whet plan --rollouts` predict what runs take? Runs of rollout_control.py beside their simulation.

    python benchmarks/rollout_simulation.py

On an otherwise idle machine. Two synchronous runs of the quickstart's model, of 8 and of 32 prompts, give the times that a
simulation needs (lengths and tools: from the records of the first). The time to compute old log-probs comes from the run with partial
rollouts, and how much trainer and engine slow each other down from their work with staleness 4. Step times and idle shares are
predicted, and compared: with dynamic sampling and staleness 1 nothing of the run was used.
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

ROUNDS = 2
LARGE = 32
"""Prompts of the second synchronous run."""
ITERATIONS = 3
"""Of the calibration: times of the engine and of the controller depend on each other."""


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


def engine_times(records: Path, runs: dict[int, dict[str, float]], guess: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a step and of a request in it, from the busy time of two runs: busy = a steps + b tokens.

    Args:
        records: folder of a recorded run.
        runs: measured times by the number of prompts.
        guess: times of engine and trainer: how many requests a step has depends on them.
    """
    rows = []
    engine = guess["engine"]
    for prompts, run in runs.items():
        found = simulate(simulation(records, "synchronous", guess, prompts))
        busy = found.step_s * (1 - found.engine_idle)
        alone = simulate(simulation(records, "synchronous", {**guess, "engine": {**engine, "step_s_per_request": 0.0}}, prompts))
        steps = alone.step_s * (1 - alone.engine_idle) / engine["step_s"]
        tokens = (busy - steps * engine["step_s"]) / engine["step_s_per_request"]
        rows.append((steps, tokens, run["time/engine_busy_s"]))
    return not_negative(rows)


def not_negative(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """The a and b above 0 with the smallest squares of (a s + b t) / busy - 1, for rows of s, t and busy."""
    shares = [(s / busy, t / busy) for s, t, busy in rows]
    ss, st, tt = (sum(x[i] * x[j] for x in shares) for i, j in ((0, 0), (0, 1), (1, 1)))
    s, t = (sum(x[i] for x in shares) for i in (0, 1))
    a, b = (s * tt - t * st) / (ss * tt - st * st), (t * ss - s * st) / (ss * tt - st * st)
    if a <= 0:
        return 1e-6, t / tt
    return (a, b) if b > 0 else (s / ss, 1e-9)


def calibrated(records: Path, real: dict[str, dict[str, float]], large: dict[str, float]) -> dict[str, Any]:
    """The times of a simulation, and what the trainer takes where it computes old log-probs."""
    small, waiting = real["synchronous"], real["partial rollouts"]
    plain, corrected = (run["time/update_s"] + run["time/annotate_s"] for run in (small, waiting))
    besides = small["step_s"] - plain - small["time/rollout_s"] - small["time/publish_s"]
    engine = {"step_s": 1e-3, "step_s_per_request": 1e-4, "prefill_tokens_per_s": 1e9, "update_s": small["time/publish_s"]}
    trainer = {"tokens_per_s": 1e12, "step_s": plain, "other_s": besides, "driver_s_per_turn": 1e-3}
    times = {"engine": engine, "trainer": trainer}
    for _ in range(ITERATIONS):
        engine["step_s"], engine["step_s_per_request"] = engine_times(records, {8: small, LARGE: large}, times)
        low, high = 0.0, 0.01
        for _ in range(10):
            trainer["driver_s_per_turn"] = (low + high) / 2
            found = simulate(simulation(records, "synchronous", times))
            low, high = (low, trainer["driver_s_per_turn"]) if found.step_s > small["step_s"] else (trainer["driver_s_per_turn"], high)
    times["trainer_step_s_with_old_logprobs"] = corrected
    for part, by in slowdowns(real).items():
        times[part]["shared_slowdown"] = by
    return times


def slowdowns(real: dict[str, dict[str, float]]) -> dict[str, float]:
    """Shares by which trainer and engine take longer while both compute: by what they take longer in a run with staleness 4, over the share
    of its time in which the other computes (beside the engine the controller's turns, which fill its pauses in a synchronous rollout)."""
    alone, waiting, shared = (real[name] for name in ("synchronous", "partial rollouts", "staleness 4"))
    corrected, slowed = (run["time/update_s"] + run["time/annotate_s"] for run in (waiting, shared))
    engine = shared["time/engine_busy_s"] / alone["time/engine_busy_s"] - 1
    turns = alone["time/rollout_s"] - alone["time/engine_busy_s"]
    rollouts = min(1.0, (shared["time/engine_busy_s"] + turns) / shared["step_s"])
    return {"trainer": max(0.0, (slowed / corrected - 1) / rollouts), "engine": max(0.0, engine / (slowed / shared["step_s"]))}


def times_of(variant: str, times: dict[str, Any]) -> dict[str, Any]:
    """Times of a variant: only those that correct for older policies compute old log-probs."""
    step_s = times["trainer_step_s_with_old_logprobs"] if "algo" in VARIANTS[variant] else times["trainer"]["step_s"]
    return {"engine": times["engine"], "trainer": {**times["trainer"], "step_s": step_s}}


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
    times = calibrated(records, real, large)
    out: dict[str, Any] = {"command": "python benchmarks/rollout_simulation.py", "machine": machine(), "rounds": ROUNDS, "times": times}
    out["measured"] = {**real, f"synchronous, {LARGE} prompts": large}
    out["load_average"] = max(row["load_average"] for row in real.values())
    out["variants"] = {name: compared(row, simulate(simulation(records, name, times_of(name, times)))) for name, row in real.items()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rollout_simulation.json").write_text(json.dumps(out, indent=1) + "\n")
    for name, row in out["variants"].items():
        print(name, json.dumps(row))


if __name__ == "__main__":
    main()
