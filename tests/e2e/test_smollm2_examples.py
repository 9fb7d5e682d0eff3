"""examples/smollm2: its problems are right, its files are in order, and its scripts train, here with a small model in SmolLM2's place."""

import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

import whet
from whet.check.check import check
from whet.quickstart.model import SmallModelConfig, make_model

FOLDER = Path(__file__).resolve().parents[2] / "examples/smollm2"
SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
KINDS = ("sums", "four_kinds")


@pytest.fixture(scope="module")
def problems():
    return runpy.run_path(str(FOLDER / "problems.py"))


@pytest.fixture
def here(tmp_path, monkeypatch, problems):
    """A folder with the model and the data that the files name."""
    make_model(tmp_path / "models/smollm2", [row["prompt"] for row in problems["four_kinds_split"]()[0]], SHAPE, 0)
    monkeypatch.chdir(tmp_path)
    problems["write_all"](Path("runs/smollm2/data"), 0)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield tmp_path
    sys.modules.pop("problems", None)


def right_answer(question: str) -> int:
    if kind := re.match(r"Which is the (largest|smallest) of ([\d, ]+) and (\d+)\?", question):
        return {"largest": max, "smallest": min}[kind[1]](map(int, [*kind[2].split(","), kind[3]]))
    return eval(re.match(r"What is ([+*\d ]+)\?", question)[1])


def test_the_labels_are_right_and_nothing_is_in_training_and_held_out(problems):
    for (train, held_out), num in ((problems["split"](problems["sums"](), seed=0), 8100), (problems["four_kinds_split"](), 484)):
        assert len(held_out) == 100 and len(train) + 100 == num == len({row["prompt"] for row in (*train, *held_out)})
        assert all(int(row["label"]) == right_answer(row["prompt"]) for row in (*train, *held_out))


def test_the_four_kinds_are_as_many_held_out(problems):
    kinds = Counter(row["kind"] for row in problems["four_kinds_split"]()[1])
    assert kinds == dict.fromkeys(("sum", "product", "largest", "smallest"), 25)


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
    assert run.results["eval/test/tasks"] == 100 and "Answer with the number only." in capsys.readouterr().out
