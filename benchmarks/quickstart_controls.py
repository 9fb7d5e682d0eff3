"""Is it the reward that teaches, and is it the tool that answers? Two controls for the quickstart.

    python benchmarks/quickstart_controls.py [SEED]

Both start from the warmed-up model of `runs/quickstart-seed<SEED>` (made by benchmarks/quickstart_seeds.py) and repeat its reinforcement
learning with one thing changed:

- shuffled rewards: the rewards of each rollout are permuted over its trajectories, so they say nothing about who earned them;
- blanked replies: the calculator answers with an empty text, in training and in evaluation; and the normally trained model is evaluated
  once with blanked replies.

Figures go to benchmarks/results/quickstart_controls.json.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from machine import RESULTS, machine

from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool
from whet.quickstart.run import QuickstartConfig, rl_config
from whet.rollout.user_rollouts import Ask
from whet.runs.commands import evaluate, train
from whet.settings.rl import RunConfig
from whet.types import Group, Trajectory

ACCURACY = "eval/held_out/reward/total"
BLANKED = f"{Path(__file__).resolve()}:blanked_env"
SHUFFLED = f"{Path(__file__).resolve()}:shuffled"


async def shuffled(ask: Ask) -> list[Group]:
    """A rollout whose rewards are permuted over its scored trajectories."""
    groups = await ask.runner.play(ask.source.next(ask.wanted.groups), ask.wanted.samples_per_prompt, ask.seed)
    rewards = [t.rewards for group in groups for t in group.trajectories if t.rewards is not None]
    random.Random(f"{ask.seed}/{groups[0].task.id}").shuffle(rewards)
    left = iter(rewards)

    def swapped(trajectory: Trajectory) -> Trajectory:
        return trajectory if trajectory.rewards is None else replace(trajectory, rewards=next(left))

    return [replace(group, trajectories=tuple(map(swapped, group.trajectories))) for group in groups]


def blanked_env(options: Mapping[str, object] | None = None) -> ToolEnv:
    """The quickstart's environment with a calculator that says nothing."""

    def calculator(expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: numbers with + - * / and parentheses.
        """
        return ""

    return ToolEnv([Tool(calculator)])


def with_(config: RunConfig, **changes: object) -> RunConfig:
    return RunConfig.model_validate({**config.model_dump(), **changes})


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    config = QuickstartConfig(seed=seed, run_dir=f"runs/quickstart-seed{seed}")
    run_dir = Path(config.run_dir)
    results = json.loads((run_dir / "summary.json").read_text())
    warm = run_dir / "warmup/model"
    for name in ("control_shuffled", "control_blanked"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    blank_env = {"name": BLANKED}

    plain = rl_config(config, warm, "control_shuffled")
    shuffled_accuracy = train(with_(plain, control={**plain.control.model_dump(), "rollout": SHUFFLED}))[ACCURACY]

    final = rl_config(config, run_dir / "rl/model", "control_blanked_evaluation")
    final_blanked = evaluate(with_(final, env=blank_env))[ACCURACY]
    blanked = with_(rl_config(config, warm, "control_blanked"), env=blank_env)
    blanked_accuracy = train(blanked)[ACCURACY]

    figures = {
        "accuracy_warmup": results["accuracy_warmup"],
        "accuracy_rl": results["accuracy_rl"],
        "accuracy_rl_shuffled_rewards": shuffled_accuracy,
        "gain_shuffled_rewards": shuffled_accuracy - results["accuracy_warmup"],
        "accuracy_rl_evaluated_with_blanked_replies": final_blanked,
        "accuracy_trained_and_evaluated_with_blanked_replies": blanked_accuracy,
    }
    out = {"command": f"python benchmarks/quickstart_controls.py {seed}", "machine": machine(), "seed": seed, **figures}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart_controls.json").write_text(json.dumps(out, indent=1) + "\n")
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    held = figures["gain_shuffled_rewards"] <= 0.05 and max(final_blanked, blanked_accuracy) <= 0.3
    print("the controls hold" if held else "A CONTROL FAILED")


if __name__ == "__main__":
    main()
