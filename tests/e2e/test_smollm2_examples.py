"""examples/smollm2: its problems are right, its files are in order, and its scripts train, here with a small model in SmolLM2's place."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import whet
from whet.check.check import check
from whet.quickstart.model import SmallModelConfig, make_model

FOLDER = Path(__file__).resolve().parents[2] / "examples/smollm2"
SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
KINDS = ("sums", "plus_minus")


@pytest.fixture(scope="module")
def problems():
    return runpy.run_path(str(FOLDER / "problems.py"))


@pytest.fixture
def here(tmp_path, monkeypatch, problems):
    """A folder with the model and the data that the files name."""
    make_model(tmp_path / "models/smollm2", [row["prompt"] for row in problems["plus_minus"]()], SHAPE, 0)
    monkeypatch.chdir(tmp_path)
    problems["write_all"](Path("runs/smollm2/data"), 0)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield tmp_path
    sys.modules.pop("problems", None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_labels_are_right_and_nothing_is_in_training_and_held_out(problems, kind):
    rows = problems[kind]()
    for row in rows:
        assert int(row["label"]) == eval(re.match(r"What is ([-+\d ]+)\?", row["prompt"])[1]) >= 0
    train, held_out = problems["split"](rows, seed=0)
    assert len(held_out) == 100 and len(train) + 100 == len(rows) == len({row["prompt"] for row in (*train, *held_out)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_in_order(here, kind):
    found = check(FOLDER / f"{kind}.toml", ["model.device=cpu"], lambda finding: None)
    assert (found.command, found.failed) == ("train", 0), [f for f in found.findings if f.status == "FAIL"]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_has_eight_lines_and_trains(here, kind, monkeypatch, capsys):
    text = (FOLDER / f"{kind}.py").read_text()
    assert len([line for line in text.splitlines() if line]) <= 8
    train = whet.train
    monkeypatch.setattr(whet, "train", lambda *given, **more: train(*given, **{**more, "num_rollouts": 2, "observe__display": "none"}))
    run = runpy.run_path(str(FOLDER / f"{kind}.py"))["run"]
    assert run.status == "finished" and len([row for row in run.rows if "reward/total" in row]) == 2
    assert run.results["eval/test/tasks"] == 100 and "What is " in capsys.readouterr().out
