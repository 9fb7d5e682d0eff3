"""examples/rlhf, command by command as its README has them, with fewer steps: the reward model learns, and PPO raises its score."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny_run import metrics_of
from whet.check.check import check
from whet.config import load_config
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig
from whet.settings.supervised import RewardModelRunConfig, SupervisedRunConfig

pytestmark = [pytest.mark.long, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/rlhf"
COMMANDS = {"sft": (SupervisedRunConfig, train_on_data), "rm": (RewardModelRunConfig, train_on_data), "train": (RunConfig, train)}
QUIET = ["observe.display=none", "model.device=cpu", "checkpoint.interval=none"]
DATA = "runs/rlhf/data"
FEWER = {
    "sft": [f"data.path={DATA}/sft.jsonl@[0:6400]", "num_steps=120"],
    "rm": [
        f"data.path={DATA}/pairs.jsonl@[0:4000]", "num_epochs=none", "num_steps=60",
        f"evaluate.path={DATA}/pairs_held_out.jsonl@[0:400]", "evaluate.interval=none",
    ],
    "train": [
        f"data.train={DATA}/prompts.jsonl@[0:1600]", "num_rollouts=20", "train.optim.lr=5e-4",
        "evaluate.interval=none", "evaluate.sets.held_out.limit=120",
    ],
}  # fmt: skip
"""What makes each command shorter: the model learns manners and whole sentences, and hardly a capital."""


def commands() -> list[list[str]]:
    """The README's commands."""
    return [line.split() for line in re.findall(r"```\n(python .*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)[0].splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the pipeline ran."""
    folder = tmp_path_factory.mktemp("rlhf")
    (folder / "examples").symlink_to(ROOT / "examples")
    made, *runs = commands()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        subprocess.run([sys.executable, *made[1:]], check=True, timeout=120, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        for _, command, path in runs:
            overrides = [*QUIET, *FEWER[command]]
            found = check(Path(path), overrides, lambda finding: None)
            assert (found.command, found.failed) == (command, 0), [f for f in found.findings if f.status == "FAIL"]
            config, run = COMMANDS[command]
            run(load_config(config, Path(path), overrides))
    return folder


def test_the_reward_model_agrees_with_the_judges_beyond_chance(folder):
    rows = [row for row in metrics_of(folder / "runs/rlhf/reward") if "eval/rm/accuracy" in row]
    before, after = (rows[i]["eval/rm/accuracy"] for i in (0, -1))
    pairs = [json.loads(line) for line in (folder / "runs/rlhf/data/pairs_held_out.jsonl").read_text().splitlines()]
    ceiling = sum(pair["chosen_quality"] > pair["rejected_quality"] for pair in pairs) / len(pairs)
    assert after > 0.62, f"from {before:.3f} to {after:.3f}"
    assert after < ceiling < 0.9, "the judges err"


def test_ppo_raises_the_score_on_held_out_prompts_and_the_true_quality_with_it(folder):
    rows = [row for row in metrics_of(folder / "runs/rlhf/ppo") if "eval/held_out/reward/score" in row]
    for name, margin in (("score", 0.3), ("quality", 0.2)):
        before, after = (rows[i][f"eval/held_out/reward/{name}"] for i in (0, -1))
        assert after > before + margin, f"{name}: from {before:.3f} to {after:.3f}"
        assert rows[-1]["eval/held_out/reward/total"] == rows[-1]["eval/held_out/reward/score"], "the quality has no weight"


def test_the_kl_to_the_reference_grows_from_nothing(folder):
    kls = [row["reward_kl/kl"] for row in metrics_of(folder / "runs/rlhf/ppo") if "reward_kl/kl" in row]
    assert abs(kls[0]) < 1e-5 and kls[-1] > 0.01
