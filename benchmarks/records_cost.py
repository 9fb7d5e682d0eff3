"""Share of a run's step that records of every token take: the quickstart's model with records of every rollout, and without any.

    python benchmarks/records_cost.py

Both runs in turn, several times; CPU seconds of the whole process for each step, so that other work on the machine counts little, and
wall-clock seconds. Figures go to benchmarks/results/records_cost.json.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import RESULTS, machine
from rollout_control import NUM_HELD_OUT, SKIPPED, TIMED_ROLLOUTS, lines_of, settings, warmed

from whet.runs.commands import train
from whet.settings.rl import RunConfig

ROUNDS = 3


def run_of(*, recorded: bool) -> dict[str, float]:
    """Seconds of a step."""
    config, model = warmed(0, NUM_HELD_OUT)
    config = config.model_copy(update={"num_rollouts": TIMED_ROLLOUTS})
    run = settings(config, model, "recorded" if recorded else "plain", "synchronous", "calculator", evaluated=False)
    observe = {"display": "none", "records": {"every": 1 if recorded else 0}}
    run = RunConfig.model_validate({**run.model_dump(exclude_unset=True), "observe": observe})
    shutil.rmtree(run.run_dir, ignore_errors=True)
    began = time.process_time()
    train(run)
    cpu_s = (time.process_time() - began) / TIMED_ROLLOUTS
    steps = lines_of(run)[SKIPPED:]
    size = sum(path.stat().st_size for path in Path(run.run_dir).rglob("*.parquet"))
    return {"cpu_s": cpu_s, "step_s": sum(step["time/step_s"] for step in steps) / len(steps), "bytes": size}


def main() -> None:
    rounds = [{name: run_of(recorded=name == "recorded") for name in ("plain", "recorded")} for _ in range(ROUNDS)]
    share = {key: median(each["recorded"][key] / each["plain"][key] for each in rounds) - 1 for key in ("cpu_s", "step_s")}
    out: dict[str, Any] = {"command": "python benchmarks/records_cost.py", "machine": machine(), "share": share, "rounds": rounds}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "records_cost.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(share))


if __name__ == "__main__":
    main()
