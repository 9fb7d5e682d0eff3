"""The quickstart's reinforcement learning, in short, under every layout: with its own rollouts, and with the same recorded ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster.cluster_run import ROOT, SHAPE, begin, ended
from whet.quickstart.run import QuickstartConfig, make_files, rl_config
from whet.runs import commands
from whet.settings.rl import RunConfig

pytestmark = pytest.mark.long

ROLLOUTS = 10
LAYOUTS = {
    "fsdp2": {"train": {"parallel": {"shard": 2}}},
    "tp2": {"train": {"parallel": {"tensor": 2}}},
    "cp2": {"train": {"parallel": {"context": 2}}},
    "ray_colocate": {"cluster": {"backend": "ray"}, "train": {"parallel": {"shard": 2}}, "engine": {"embedded": {"copies": 2}}},
    "ray_disaggregate": {"cluster": {"backend": "ray", "layout": "disaggregate"}},
}
ASYNC = {"cluster": {"backend": "ray", "layout": "async"}, "control": {"max_staleness": 2}, "deterministic": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The quickstart's files for a smaller model, and a run of one process whose rollouts were kept."""
    folder = tmp_path_factory.mktemp("layouts")
    make_files(small(folder), folder)
    shutil.copy(ROOT / "tests/cluster/recorded.py", folder)
    commands.train(config_of(folder, "alone", observe={"on_rollout": f"{folder}/recorded.py:keep"}))
    return folder


def small(folder: Path) -> QuickstartConfig:
    sizes = {"num_demonstrations": 64, "num_rollouts": ROLLOUTS, "prompts_per_rollout": 4, "samples_per_prompt": 4, "num_held_out": 8}
    return QuickstartConfig.model_validate({"run_dir": str(folder), "shape": SHAPE, "save_every": 1000, **sizes})


def config_of(folder: Path, name: str, **changes) -> RunConfig:
    """Untrained weights know no answer, so length is what is learned; two steps a rollout, so that the second one's ratios are not 1."""
    settings = rl_config(small(folder), folder / "base", name).model_dump(exclude_unset=True)
    settings |= {
        "reward": {"name": f"{ROOT / 'tests/e2e/length_reward.py'}:score"},
        "rollout": {**settings["rollout"], "max_turn_tokens": 12},
    }
    settings["batch"] |= {"steps_per_rollout": 2}
    settings["train"]["optim"] |= {"lr": 1e-3}
    settings["observe"] = {"display": "none"}
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(settings)


def logged(folder: Path, name: str) -> list[dict[str, float]]:
    """The lines of the updates."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "optim/grad_norm" in line]


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name == "ray_colocate" else pytest.mark.slow) for name in LAYOUTS])
def test_the_same_rollouts_give_the_same_losses_and_gradients(folder, layout):
    name = f"recorded_{layout}"
    control = {"control": {"rollout": f"{folder}/recorded.py:give"}}
    status, _, err = ended(begin(config_of(folder, name, **control, **LAYOUTS[layout])))
    assert status == 0, err
    mine, alone = logged(folder, name), logged(folder, "alone")
    assert len(mine) == len(alone) == ROLLOUTS
    for key in ("optim/grad_norm", "policy/loss"):
        assert any(abs(line[key]) > 1e-4 for line in alone)
        assert [line[key] for line in mine] == pytest.approx([line[key] for line in alone], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, "ray_async"])
def test_the_quickstarts_phase_runs(folder, layout):
    """Live, what is sampled follows weights that differ in their last bits."""
    status, _, err = ended(begin(config_of(folder, layout, num_rollouts=4, **{**LAYOUTS, "ray_async": ASYNC}[layout])))
    assert status == 0, err
    lines = logged(folder, layout)
    assert [line["run/version"] for line in lines] == [1, 2, 3, 4]
    assert all(line["outcome/failed"] == 0 for line in lines)
    if layout != "ray_async":
        assert lines[0]["reward/total"] == pytest.approx(logged(folder, "alone")[0]["reward/total"])
