"""What `deterministic = true` costs: the quickstart's reinforcement learning with and without it, in turn, on the same warmed-up model.

    python benchmarks/deterministic_cost.py

Twice: with the quickstart's own calculator, which answers at once, and with one that sleeps for a tenth of the expressions. Figures go to
benchmarks/results/deterministic_cost.json: seconds per rollout and per step, medians over the steps of all rounds, and their ratios.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median

from machine import RESULTS, machine
from slow_tools import SLEEP_S

from whet.observe.retention import RecordsConfig
from whet.quickstart.run import QuickstartConfig, make_files, rl_config, warmup_config
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig

ROUNDS = 3
NUM_ROLLOUTS = 6
FOLDER = Path("runs/deterministic_cost")
TOOLS = {"calculator": "calculator", "calculator, 1 in 10 sleeps": f"{Path(__file__).parent / 'slow_tools.py'}:calculator"}


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    config = QuickstartConfig(run_dir=str(FOLDER), num_demonstrations=2000, warmup_steps=200, num_rollouts=NUM_ROLLOUTS, num_held_out=1)
    make_files(config, FOLDER)
    train_on_data(warmup_config(config))
    warm = FOLDER / "warmup/model"
    seconds: dict[tuple[str, bool], list[dict[str, float]]] = {}
    for number in range(ROUNDS):
        for i, (name, tool) in enumerate(TOOLS.items()):
            for deterministic in (True, False):
                steps = run(rl_config(config, warm, f"rl-{number}-{i}-{deterministic}"), tool, deterministic)
                seconds.setdefault((name, deterministic), []).extend(steps[1:])  # the first one warms up
    rows = [row(name, seconds) for name in TOOLS]
    out = {"command": "python benchmarks/deterministic_cost.py", "machine": machine(), "rounds": ROUNDS, "sleep_s": SLEEP_S, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "deterministic_cost.json").write_text(json.dumps(out, indent=1) + "\n")
    for found in rows:
        print(json.dumps(found))


def run(config: RunConfig, tool: str, deterministic: bool) -> list[dict[str, float]]:
    """One run's steps, as it logged them."""
    env = config.env.model_copy(update={"tools": [tool]})
    quiet = config.observe.model_copy(update={"display": "none", "records": RecordsConfig(every=0)})
    config = config.model_copy(
        update={"deterministic": deterministic, "env": env, "observe": quiet, "evaluate": config.evaluate.model_copy(update={"sets": {}})}
    )
    train(config)
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def row(name: str, seconds: dict[tuple[str, bool], list[dict[str, float]]]) -> dict[str, object]:
    """Medians of both modes, and how many times as long the deterministic one takes."""
    out: dict[str, object] = {"tool": name}
    for key in ("time/rollout_s", "time/update_s", "time/step_s"):
        with_, without = (median(step[key] for step in seconds[name, mode]) for mode in (True, False))
        out[key] = {"deterministic": with_, "not": without, "ratio": with_ / without}
    return out


if __name__ == "__main__":
    main()
