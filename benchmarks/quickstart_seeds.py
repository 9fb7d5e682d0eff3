"""The quickstart on three seeds, one after the other; figures go to benchmarks/results/quickstart_seeds.json.

    python benchmarks/quickstart_seeds.py [SEED ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from machine import RESULTS, machine

LIMIT_S = 1200


def main() -> None:
    seeds = [int(arg) for arg in sys.argv[1:]] or [0, 1, 2]
    rows = []
    for seed in seeds:
        summary = Path(f"runs/quickstart-seed{seed}.json")
        run_dir = f"runs/quickstart-seed{seed}"
        subprocess.run(["rm", "-rf", run_dir], check=True)
        command = [sys.executable, "-m", "whet", "quickstart", "--seed", str(seed), "--run-dir", run_dir, "--summary", str(summary)]
        subprocess.run(command, check=True, timeout=LIMIT_S)
        row = json.loads(summary.read_text())
        row["mismatch"] = mismatch(Path(run_dir))
        rows.append(row)
    out = {"command": " ".join(["python benchmarks/quickstart_seeds.py", *sys.argv[1:]]), "machine": machine(), "runs": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart_seeds.json").write_text(json.dumps(out, indent=1) + "\n")
    for row in rows:
        gain = row["accuracy_rl"] - row["accuracy_warmup"]
        held = gain >= 0.25 and row["accuracy_rl"] >= 0.8 and row["seconds"] <= 600
        verdict = "as promised" if held else "NOT AS PROMISED"
        print(f"seed {row['seed']}: {row['accuracy_warmup']:.3f} -> {row['accuracy_rl']:.3f} in {row['seconds']:.0f} s: {verdict}")


def mismatch(run_dir: Path) -> dict[str, float]:
    """The worst step's train/rollout log-prob difference, in nats."""
    rows = [json.loads(line) for line in (run_dir / "rl/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "policy/loss" in row]
    return {
        "num_steps": len(steps),
        "largest_mean": max(row["mismatch/logprob_mean"] for row in steps),
        "largest_max": max(row["mismatch/logprob_max"] for row in steps),
    }


if __name__ == "__main__":
    main()
