"""The pipeline of examples/rlhf on some seeds, one after the other; figures go to benchmarks/results/rlhf.json.

    python benchmarks/rlhf.py [SEED ...]

Each seed makes its own model, data and runs; `runs/rlhf` is moved to `runs/rlhf-seed<SEED>` afterwards.
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

FOLDER = Path("runs/rlhf")
PHASES = {
    "data": ["examples/rlhf/data.py", "--seed={}"],
    "sft": ["-m", "whet", "sft", "examples/rlhf/sft.toml", "seed={}"],
    "rm": ["-m", "whet", "rm", "examples/rlhf/rm.toml", "seed={}"],
    "ppo": ["-m", "whet", "train", "examples/rlhf/ppo.toml", "seed={}"],
}
LIMIT_S = 1200
LAST = 10
"""Rollouts that the final KL is a mean over."""


def main() -> None:
    runs = [run(int(arg)) for arg in sys.argv[1:] or ["0", "1", "2"]]
    out = {"command": " ".join(["python benchmarks/rlhf.py", *sys.argv[1:]]), "machine": machine(), "runs": runs}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rlhf.json").write_text(json.dumps(out, indent=1) + "\n")
    for row in runs:
        pairs, first, last = row["pair_accuracy"], row["ppo"][0], row["ppo"][-1]
        print(
            f"seed {row['seed']}: pair accuracy {pairs['before']:.3f} -> {pairs['after']:.3f} (ceiling {pairs['ceiling']:.3f}), "
            f"score {first['score']:.2f} -> {last['score']:.2f}, quality {first['quality']:.2f} -> {last['quality']:.2f}, "
            f"KL {row['kl_per_token']:.3f} nats per token, {sum(row['seconds'].values()):.0f} s"
        )


def run(seed: int) -> dict[str, Any]:
    """The four commands with a seed, and what they measured."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    seconds: dict[str, float] = {}
    for name, arguments in PHASES.items():
        began = time.perf_counter()
        subprocess.run([sys.executable, *(argument.format(seed) for argument in arguments)], check=True, timeout=LIMIT_S)
        seconds[name] = time.perf_counter() - began
    found = {"seed": seed, "seconds": seconds, **measured()}
    kept = FOLDER.with_name(f"rlhf-seed{seed}")
    shutil.rmtree(kept, ignore_errors=True)
    FOLDER.rename(kept)
    return found


def measured() -> dict[str, Any]:
    """What the runs' folders say. Scores and qualities are means over replies to the held-out prompts, by rollouts done."""
    pairs = read_lines(FOLDER / "data/pairs_held_out.jsonl")
    accuracies = [row["eval/rm/accuracy"] for row in read_lines(FOLDER / "reward/metrics.jsonl") if "eval/rm/accuracy" in row]
    rows = read_lines(FOLDER / "ppo/metrics.jsonl")
    prefix = "eval/held_out/reward/"
    return {
        "pair_accuracy": {"before": accuracies[0], "after": accuracies[-1], "ceiling": ceiling(pairs), "pairs": len(pairs)},
        "ppo": [
            {"rollouts": row["step"], **{key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}}
            for row in rows
            if f"{prefix}score" in row
        ],
        "kl_per_token": sum(row["reward_kl/kl"] for row in [row for row in rows if "reward_kl/kl" in row][-LAST:]) / LAST,
    }


def ceiling(pairs: list[dict[str, Any]]) -> float:
    """The accuracy of the true quality on pairs that a noisy judge labelled; of equally good replies a half is counted."""
    ahead = [pair["chosen_quality"] - pair["rejected_quality"] for pair in pairs]
    return sum(1.0 if x > 0 else 0.5 if x == 0 else 0.0 for x in ahead) / len(ahead)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
