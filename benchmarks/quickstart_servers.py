"""The quickstart's RL phase with servers of vLLM in place of the embedded engine, on three seeds; figures go to
benchmarks/results/quickstart_servers.json.

    python benchmarks/quickstart_servers.py VLLM/bin/python [SEED ...]

Each seed's quickstart runs first, unless its folder is there: runs/quickstart-seed0, .... vLLM's build for CPUs takes most of the machine's
memory unless VLLM_CPU_KVCACHE_SPACE=1 (GiB) is set; VLLM_CPU_OMP_THREADS_BIND=nobind lets it share the cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from machine import RESULTS, machine

from whet.quickstart.run import QuickstartConfig, rl_config
from whet.runs.commands import train
from whet.settings.rl import RunConfig

LIMIT_S = 1800
ARGS = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 64}


def main() -> None:
    python, *seeds = sys.argv[1:]
    rows = [measured(python, seed) for seed in map(int, seeds or ["0", "1", "2"])]
    out = {"command": " ".join(["python benchmarks/quickstart_servers.py VLLM/bin/python", *seeds]), "machine": machine(), "runs": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart_servers.json").write_text(json.dumps(out, indent=1) + "\n")
    for row in rows:
        verdict = "as promised" if row["servers"] >= row["embedded"] - 0.05 else "NOT AS PROMISED"
        print(f"seed {row['seed']}: embedded {row['embedded']:.3f}, servers {row['servers']:.3f} in {row['seconds']:.0f} s: {verdict}")


def measured(python: str, seed: int) -> dict[str, float]:
    folder = Path(f"runs/quickstart-seed{seed}")
    if not (folder / "summary.json").is_file():
        subprocess.run([sys.executable, "-m", "whet", "quickstart", "--seed", str(seed)], check=True, timeout=LIMIT_S)
    known = json.loads((folder / "summary.json").read_text())
    config = QuickstartConfig.model_validate(tomllib.loads((folder / "quickstart.toml").read_text()))
    table = rl_config(config, folder / "warmup/model", "rl").model_dump()
    name = folder / "rl-servers"
    engine = {"name": "vllm", "python": python, "vllm": {"args": ARGS}}
    changed = {"engine": engine, "deterministic": False, "run_dir": str(name), "sync": {"transport": "disk"}}
    began = time.perf_counter()
    found = train(RunConfig.model_validate(table | changed), "benchmarks/quickstart_servers.py")
    steps = [row for row in map(json.loads, (name / "metrics.jsonl").read_text().splitlines()) if "policy/loss" in row]
    return {
        "seed": seed,
        "warmup": known["accuracy_warmup"],
        "embedded": known["accuracy_rl"],
        "servers": found["eval/held_out/reward/total"],
        "seconds": time.perf_counter() - began,
        "num_steps": len(steps),
        "largest_mean_logprob_difference": max(row["mismatch/logprob_mean"] for row in steps),
        "largest_logprob_difference": max(row["mismatch/logprob_max"] for row in steps),
        "largest_probe_difference": max(row["sync/probe_nats"] for row in steps),
    }


if __name__ == "__main__":
    main()
