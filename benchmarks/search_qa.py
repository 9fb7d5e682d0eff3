"""The example examples/search_qa on some seeds, one after the other; figures go to benchmarks/results/search_qa.json.

    python benchmarks/search_qa.py [SEED ...]

Each seed makes its own model, demonstrations and runs; `runs/search_qa` is moved to `runs/search_qa-seed<SEED>` afterwards.
A seed whose folder is there already is measured again, not run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import RESULTS, machine

FOLDER = Path("runs/search_qa")
PHASES = {
    "data": ["examples/search_qa/data.py", "--seed={}"],
    "sft": ["-m", "whet", "sft", "examples/search_qa/sft.toml", "seed={}"],
    "rl": ["-m", "whet", "train", "examples/search_qa/run.toml", "seed={}"],
}
LIMIT_S = 1800


def main() -> None:
    seeds = [int(arg) for arg in sys.argv[1:] or ["0", "1", "2"]]
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        runs.append(run(seed))
        command = " ".join(["python benchmarks/search_qa.py", *sys.argv[1:]])
        (RESULTS / "search_qa.json").write_text(json.dumps({"command": command, "machine": machine(), "runs": runs}, indent=1) + "\n")
        found = runs[-1]
        print(f"seed {seed}: held-out exact match {found['warmup']['right']:.3f} -> {found['rl']['right']:.3f}", flush=True)


def run(seed: int) -> dict[str, Any]:
    """The three commands with a seed, and what they measured."""
    kept = FOLDER.with_name(f"search_qa-seed{seed}")
    seconds: dict[str, float] = {}
    if not kept.exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        for name, arguments in PHASES.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *(argument.format(seed) for argument in arguments)], check=True, timeout=LIMIT_S)
            seconds[name] = time.perf_counter() - began
        FOLDER.rename(kept)
    rows = [json.loads(line) for line in (kept / "rl/metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/held_out/reward/right" in row]
    return {"seed": seed, "seconds": seconds, "warmup": shares(evaluated[0]), "rl": shares(evaluated[-1])}


def shares(row: dict[str, float]) -> dict[str, float]:
    """Shares of the held-out questions that were answered rightly, and that were searched for."""
    return {name: row[f"eval/held_out/reward/{name}"] for name in ("right", "searched")}


if __name__ == "__main__":
    main()
