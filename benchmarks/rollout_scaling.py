"""Synchronous and asynchronous training on 64 and 512 GPUs, simulated: the table of docs/scaling.md.

    python benchmarks/rollout_scaling.py

Nothing here was measured on GPUs: the times are those of examples/plan_rollouts.toml, and larger ones of the same kind. Figures go to
benchmarks/results/rollout_scaling.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from machine import RESULTS, machine

from whet.config import load_config
from whet.plan.rollouts.config import SimulationConfig
from whet.plan.rollouts.simulate import simulate

FILE = Path(__file__).parents[1] / "examples/plan_rollouts.toml"
SIZES = {64: (), 512: ("batch.prompts_per_rollout=1024", "engine.count=64", "trainer.tokens_per_s=900000")}
"""GPUs, half of them for engines of four."""
PARTIAL = ("control.max_staleness=2", "control.partial=true", "control.overlap=false", "control.over_sample=1.5")
VARIANTS: dict[str, tuple[str, ...]] = {
    "synchronous, engines beside the trainer": ("control.max_staleness=0",),
    "synchronous, all GPUs do both in turn": ("control.max_staleness=0",),
    "partial rollouts, all GPUs do both in turn": PARTIAL,
    "staleness 1": ("control.max_staleness=1",),
    "staleness 4": ("control.max_staleness=4",),
}


def settings(num_gpus: int, variant: str) -> SimulationConfig:
    overrides = ["grain=128", *SIZES[num_gpus], *VARIANTS[variant]]
    config = load_config(SimulationConfig, FILE, overrides)
    if not variant.endswith("in turn"):
        return config
    twice = {"engine.count": config.engine.count * 2, "trainer.tokens_per_s": config.trainer.tokens_per_s * 2}
    return load_config(SimulationConfig, FILE, [*overrides, *(f"{key}={value}" for key, value in twice.items())])


def main() -> None:
    out: dict[str, Any] = {"command": "python benchmarks/rollout_scaling.py", "machine": machine(), "sizes": {}}
    for num_gpus in SIZES:
        rows = out["sizes"][num_gpus] = {}
        for variant in VARIANTS:
            found = rows[variant] = simulate(settings(num_gpus, variant)).to_dict()
            cells = f"{found['step_s']:.0f} s | {found['tokens_per_s']:,.0f} | {found['engine_idle']:.0%} | {found['trainer_idle']:.0%}"
            print(f"| {num_gpus} | {variant} | {cells} | {found['mean_age']:.1f} | {found['masked_tokens'] / 1e6:.1f} |", flush=True)
            (RESULTS / "rollout_scaling.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
