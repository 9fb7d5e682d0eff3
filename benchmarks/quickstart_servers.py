"""The quickstart's RL phase with servers of vLLM in place of the embedded engine, on three seeds; figures go to
benchmarks/results/quickstart_servers.json, beside those of earlier runs.

    python benchmarks/quickstart_servers.py VLLM/bin/python [SEED ...] [--rollouts 240]

Each seed's quickstart runs first, unless its folder is there: runs/quickstart-seed0, .... With another number of rollouts than the
quickstart's, the embedded engine makes that many, too, from the same warmed-up model. vLLM's build for CPUs takes most of the machine's
memory unless VLLM_CPU_KVCACHE_SPACE=1 (GiB) is set; VLLM_CPU_OMP_THREADS_BIND=nobind lets it share the cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from machine import RESULTS, machine

from whet.quickstart.run import QuickstartConfig, rl_config
from whet.runs.commands import train
from whet.settings.rl import RunConfig

LIMIT_S = 1800
ARGS = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="the interpreter that has vLLM")
    parser.add_argument("seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=QuickstartConfig().num_rollouts)
    asked = parser.parse_args()
    path = RESULTS / "quickstart_servers.json"
    kept = json.loads(path.read_text())["runs"] if path.is_file() else []
    for seed in asked.seeds:
        row = measured(asked.python, seed, asked.rollouts)
        kept = [other for other in kept if (other["seed"], other["num_steps"]) != (seed, asked.rollouts)] + [row]
        out = {"command": f"python benchmarks/quickstart_servers.py VLLM/bin/python --rollouts {asked.rollouts}", "runs": kept}
        path.write_text(json.dumps(out, indent=1) + "\n")
        verdict = "as promised" if row["servers"] >= row["embedded"] - 0.05 else "NOT AS PROMISED"
        print(f"seed {seed}: embedded {row['embedded']:.3f}, servers {row['servers']:.3f} in {row['seconds']:.0f} s: {verdict}", flush=True)


def measured(python: str, seed: int, rollouts: int) -> dict[str, Any]:
    folder = Path(f"runs/quickstart-seed{seed}")
    if not (folder / "summary.json").is_file():
        subprocess.run([sys.executable, "-m", "whet", "quickstart", "--seed", str(seed)], check=True, timeout=LIMIT_S)
    known = json.loads((folder / "summary.json").read_text())
    config = QuickstartConfig.model_validate(tomllib.loads((folder / "quickstart.toml").read_text()))
    table = rl_config(config, folder / "warmup/model", "rl").model_dump()
    embedded = known["accuracy_rl"]
    if rollouts != config.num_rollouts:
        table["num_rollouts"] = rollouts
        changed = {"run_dir": str(folder / f"rl-{rollouts}")}
        embedded = train(RunConfig.model_validate(table | changed), "benchmarks/quickstart_servers.py")["eval/held_out/reward/total"]
    name = folder / f"rl-servers-{rollouts}"
    engine = {"name": "vllm", "python": python, "vllm": {"args": ARGS}}
    changed = {"engine": engine, "deterministic": False, "run_dir": str(name), "sync": {"transport": "disk"}}
    began = time.perf_counter()
    found = train(RunConfig.model_validate(table | changed), "benchmarks/quickstart_servers.py")
    steps = [row for row in map(json.loads, (name / "metrics.jsonl").read_text().splitlines()) if "policy/loss" in row]
    return {
        "seed": seed,
        "warmup": known["accuracy_warmup"],
        "embedded": embedded,
        "servers": found["eval/held_out/reward/total"],
        "seconds": time.perf_counter() - began,
        "num_steps": len(steps),
        "largest_mean_logprob_difference": max(row["mismatch/logprob_mean"] for row in steps),
        "largest_logprob_difference": max(row["mismatch/logprob_max"] for row in steps),
        "largest_probe_difference": max(row["sync/probe_nats"] for row in steps),
        "machine": machine(),
    }


if __name__ == "__main__":
    main()
