"""An example of a searching agent on some seeds, one after the other: its data, its warm-up and its reinforcement learning."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import RESULTS, machine

PHASES = {
    "data": ["examples/{name}/data.py", "--seed={seed}"],
    "sft": ["-m", "whet", "sft", "examples/{name}/sft.toml", "seed={seed}"],
    "rl": ["-m", "whet", "train", "examples/{name}/run.toml", "seed={seed}"],
}
LIMIT_S = 1800


def measure(name: str, rewards: Sequence[str]) -> None:
    """Run the example with each seed of the command line, and write the figures to benchmarks/results.

    Each seed makes its own model, demonstrations and runs; their folder `runs/<name>` is moved to `runs/<name>-seed<SEED>` afterwards. A
    seed whose folder is there already is measured again, not run; seconds.json in it has the seconds of each command.

    Args:
        name: folder of the example.
        rewards: parts of the reward whose means over the held-out tasks are kept, the first one to be printed.
    """
    runs: list[dict[str, Any]] = []
    for seed in [int(arg) for arg in sys.argv[1:] or ["0", "1", "2"]]:
        runs.append(_run(name, rewards, seed))
        command = " ".join([f"python benchmarks/{name}.py", *sys.argv[1:]])
        (RESULTS / f"{name}.json").write_text(json.dumps({"command": command, "machine": machine(), "runs": runs}, indent=1) + "\n")
        for each in rewards:
            print(f"seed {seed}: held-out {each} {runs[-1]['warmup'][each]:.3f} -> {runs[-1]['rl'][each]:.3f}", flush=True)


def _run(name: str, rewards: Sequence[str], seed: int) -> dict[str, Any]:
    """The three commands with a seed, and what they measured."""
    folder = Path("runs") / name
    kept = folder.with_name(f"{name}-seed{seed}")
    times = kept / "seconds.json"
    if not kept.exists():
        seconds: dict[str, float] = {}
        shutil.rmtree(folder, ignore_errors=True)
        for phase, arguments in PHASES.items():
            began = time.perf_counter()
            command = [sys.executable, *(argument.format(name=name, seed=seed) for argument in arguments)]
            subprocess.run(command, check=True, timeout=LIMIT_S)
            seconds[phase] = time.perf_counter() - began
        folder.rename(kept)
        times.write_text(json.dumps(seconds))
    rows = [json.loads(line) for line in (kept / "rl/metrics.jsonl").read_text().splitlines()]
    before, after = ([row for row in rows if f"eval/held_out/reward/{rewards[0]}" in row][place] for place in (0, -1))
    warmup, rl = ({each: row[f"eval/held_out/reward/{each}"] for each in rewards} for row in (before, after))
    return {"seed": seed, "seconds": json.loads(times.read_text()) if times.exists() else {}, "warmup": warmup, "rl": rl}
