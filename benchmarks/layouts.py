"""The quickstart's reinforcement learning under every layout of processes, from one warm-up, to held-out accuracy; figures go to
benchmarks/results/layouts.json, those of a layout replacing the ones that it had.

    python benchmarks/layouts.py [LAYOUT ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from machine import RESULTS, machine

from whet.config import dump_toml
from whet.quickstart.run import QuickstartConfig, make_files, rl_config, warmup_config
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig

LIMIT_S = 3600
FOLDER = Path("runs/layouts")
METRIC = "eval/held_out/reward/total"
GOAL = 0.80
ASYNC = {"max_staleness": 2}
LAYOUTS = {
    "one_process": {},
    "fsdp2": {"train": {"parallel": {"shard": 2}}},
    "tp2": {"train": {"parallel": {"tensor": 2}}},
    "cp2": {"train": {"parallel": {"context": 2}}},
    "ray_colocate": {"cluster": {"backend": "ray"}, "train": {"parallel": {"shard": 2}}, "engine": {"embedded": {"copies": 2}}},
    "ray_disaggregate": {"cluster": {"backend": "ray", "layout": "disaggregate"}},
    "ray_async": {
        "cluster": {"backend": "ray", "layout": "async"},
        "control": ASYNC,
        "deterministic": False,
        "algo": {"clip_high": 0.28, "old_logprobs": "rollout"},
    },
}


def warmed() -> Path:
    """The model after the quickstart's warm-up; made once."""
    config = QuickstartConfig(run_dir=str(FOLDER))
    if not (FOLDER / "warmup/model").exists():
        make_files(config, FOLDER)
        train_on_data(warmup_config(config))
    return FOLDER / "warmup/model"


def config_of(name: str, model: Path) -> RunConfig:
    """The quickstart's settings of `whet train`, under a layout."""
    settings = rl_config(QuickstartConfig(run_dir=str(FOLDER)), model, name).model_dump(exclude_unset=True)
    return RunConfig.model_validate(merged(settings, LAYOUTS[name]))


def merged(below: dict, above: dict) -> dict:
    """Tables key by key, anything else replaced."""
    out = dict(below)
    for key, value in above.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def run(name: str, model: Path) -> dict[str, object]:
    """One layout, from the beginning."""
    config = config_of(name, model)
    subprocess.run(["rm", "-rf", config.run_dir], check=True)
    path = FOLDER / f"{name}.toml"
    path.write_text(dump_toml(config))
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "whet", "train", str(path)], check=True, timeout=LIMIT_S)
    seconds = time.perf_counter() - began
    rows = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    return {
        "accuracy": [row[METRIC] for row in rows if METRIC in row],
        "seconds": seconds,
        "mean_step_s": sum(row["time/step_s"] for row in steps) / len(steps),
        "mismatch_max": max(row["mismatch/logprob_max"] for row in steps),
        "settings": LAYOUTS[name],
        "machine": machine(),
    }


def main() -> None:
    names = sys.argv[1:] or list(LAYOUTS)
    if unknown := [name for name in names if name not in LAYOUTS]:
        raise SystemExit(f"no layout {', '.join(unknown)}; there are {', '.join(LAYOUTS)}")
    target = RESULTS / "layouts.json"
    found = json.loads(target.read_text()) if target.exists() else {}
    model = warmed()
    for name in names:
        found[name] = row = run(name, model)
        RESULTS.mkdir(exist_ok=True)
        target.write_text(json.dumps(found, indent=1) + "\n")
        reached = row["accuracy"][-1]
        print(f"{name}: {row['accuracy'][0]:.3f} -> {reached:.3f} in {row['seconds']:.0f} s{'' if reached >= GOAL else f': BELOW {GOAL}'}")


if __name__ == "__main__":
    main()
