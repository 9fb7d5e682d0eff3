"""examples/self_play and examples/simulated_user: their files are in order, and a shorter run of each learns."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny_run import metrics_of
from whet.check.check import check
from whet.config import load_config
from whet.runs.commands import train
from whet.settings.rl import RunConfig

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
QUIET = ["model.device=cpu", "observe.display=none", "checkpoint.interval=none"]


@pytest.mark.parametrize(("name", "metric", "margin"), [("self_play", "reward/total", 0.1), ("simulated_user", "reward/right", 0.2)])
def test_an_example_is_in_order_and_learns(name, metric, margin, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / name))
    for module in ("game", "shop"):
        sys.modules.pop(module, None)
    runpy.run_path(str(ROOT / "examples" / name / "data.py"))["write_all"](Path(f"runs/{name}"))
    found = check(Path(f"examples/{name}/run.toml"), QUIET, lambda finding: None)
    assert (found.command, found.failed) == ("train", 0), [f for f in found.findings if f.status == "FAIL"]
    train(load_config(RunConfig, Path(f"examples/{name}/run.toml"), [*QUIET, "num_rollouts=25"]))
    rows = [row[metric] for row in metrics_of(Path(f"runs/{name}/rl")) if metric in row]
    assert sum(rows[-3:]) / 3 > sum(rows[:3]) / 3 + margin, rows


@pytest.mark.parametrize("name", ["self_play", "simulated_user"])
def test_the_settings_for_a_real_model_can_be_read_and_have_no_comment(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / "examples" / name / "real.toml"
    assert not re.search(r"^ *#", path.read_text(), re.MULTILINE)
    assert load_config(RunConfig, path).env.name in ("game", "simulated_user")
