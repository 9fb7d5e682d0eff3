"""Which folder a start works in, what a finished run says, and what a start that fails leaves, on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.errors.error_bench import Bench, make_shared, snapshot

SMALL = ("num_rollouts=1",)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return make_shared(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def bench(shared, tmp_path):
    with Bench.open(shared, tmp_path / "home", fresh=True) as bench:
        (bench.folder / "free.toml").write_text((bench.folder / "run.toml").read_text().replace('run_dir = "runs/demo"\n', ""))
        bench.file("mine.py", "def score(trajectory):\n    return trajectory.turns[0].tokens[0] % 7 / 7\n")
        yield bench


def earlier_run(bench: Bench) -> Path:
    """A run that was trained to its end, as runs/demo."""
    return Path(shutil.copytree(bench.shared.earlier, bench.folder / "runs/demo"))


def folders() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir()) if Path("runs").exists() else []


def test_a_finished_run_says_so_and_ends_with_a_status_of_its_own(bench):
    assert bench.start("train", "run.toml", *SMALL)[0] == 0
    weights = (bench.folder / "runs/demo/model/model.safetensors").stat().st_mtime_ns
    status, _, err = bench.start("train", "run.toml", *SMALL)
    assert status == 3 and "finished: the run in runs/demo has done all of its 1 rollouts" in err and "Raise num_rollouts" in err
    assert bench.start("train", "run.toml", *SMALL, "--finished-ok")[0] == 0
    assert (bench.folder / "runs/demo/model/model.safetensors").stat().st_mtime_ns == weights, "nothing was written again"
    assert bench.start("train", "run.toml", *SMALL, "train.optim.lr=1e-3")[0] == 3, "another setting asks for no more of it, too"


def test_a_finished_run_says_which_functions_have_changed_since(bench):
    arguments = ("train", "run.toml", *SMALL, "reward.name=mine.py:score")
    assert bench.start(*arguments)[0] == 0
    assert "have changed" not in bench.start(*arguments)[2]
    bench.file("mine.py", "def score(trajectory):\n    return 1.0\n")
    status, _, err = bench.start(*arguments)
    assert status == 3 and "Since then have changed: mine.py:score; a run with them needs another run_dir." in err


def test_a_folder_that_nobody_named_is_of_one_run_and_goes_on_until_it_is_finished(bench):
    status, out, err = bench.start("train", "free.toml", *SMALL)
    assert status == 0 and out.startswith("a new run in runs/free-"), out + err
    (first,) = folders()
    assert bench.start("train", "free.toml", *SMALL)[0] == 0
    assert len(folders()) == 2, "it had finished: a second experiment is one"
    (Path("runs") / first / "end.json").unlink()  # as after a kill
    status, out, _ = bench.start("train", "free.toml", *SMALL)
    assert status == 0 and out.startswith(f"runs/{first} did not finish and has the same settings: it goes on") and "run_dir=PATH" in out
    assert len(folders()) == 2
    (Path("runs") / first / "end.json").unlink()
    assert bench.start("train", "free.toml", *SMALL, "seed=5")[0] == 0
    assert len(folders()) == 3, "with another setting it is another run"


def test_a_start_that_fails_tells_of_no_new_run(bench):
    status, out, err = bench.start("train", "free.toml", *SMALL, "model.path=nothing")
    assert status == 2 and "nothing" in err and "a new run" not in out + err
    assert folders() == []


def test_changed_code_is_told(bench):
    arguments = ("run.toml", "reward.name=mine.py:score")
    assert bench.start("train", *arguments, "num_rollouts=1")[0] == 0
    status, _, err = bench.start("train", *arguments, "num_rollouts=2")
    assert status == 0 and "the code of" not in err
    bench.file("mine.py", "def score(trajectory):\n    return trajectory.turns[0].tokens[0] % 5 / 5\n")
    status, _, err = bench.start("train", *arguments, "num_rollouts=3")
    assert status == 0 and "warning: the code of mine.py:score is not what it was at the last start here" in err
    starts = [json.loads(line)["code"] for line in Path("runs/demo/starts.jsonl").read_text().splitlines()]
    assert starts[0] == starts[1] != starts[2]


WRONG = ["data.train=nothing.jsonl", "model.path=nothing", "reward.name=nothing.py:f", "data.prompt_key=q", "num_epochs=1"]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_start_that_fails_before_anything_leaves_nothing(bench, wrong, command):
    sets = ("evaluate.sets.test.path=nothing.jsonl",) if command == "evaluate" else ()
    before = sorted(path.name for path in bench.folder.iterdir())
    assert bench.start(command, "run.toml", *SMALL, wrong, *sets)[0] == 2
    assert sorted(path.name for path in bench.folder.iterdir() if path.name != "__pycache__") == before
    assert folders() == []


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_a_start_that_fails_in_a_runs_folder_changes_nothing_there(bench, status):
    run = earlier_run(bench)
    end = json.loads((run / "end.json").read_text())
    (run / "end.json").write_text(json.dumps({**end, "status": status}))
    before = snapshot(run)
    (bench.folder / "empty").mkdir()
    (bench.folder / "empty/config.json").write_text((bench.folder / "model/config.json").read_text())
    for wrong in ("model.path=empty", "num_epochs=1", "data.prompt_template=nothing {missing}"):
        assert bench.start("train", "run.toml", *SMALL, wrong)[0] == 2
        assert snapshot(run) == before, wrong
    found, _, err = bench.start("train", "run.toml", *SMALL)
    assert found == (3 if status == "finished" else 0), err
    assert ("finished: the run in runs/demo has done all" in err) == (status == "finished")


def test_a_start_that_fails_gives_back_what_it_renamed(bench):
    run = earlier_run(bench)
    shutil.rmtree(run / "checkpoints")
    before = snapshot(run)
    assert bench.start("train", "run.toml", "num_rollouts=2", "num_epochs=1")[0] == 2
    assert snapshot(run) == before
    status, out, err = bench.start("train", "run.toml", "num_rollouts=2")
    assert status == 0 and "what it wrote is in metrics.1.jsonl, rollouts.1" in out + err


def test_a_start_that_fails_with_a_sandbox_leaves_nothing(bench, monkeypatch):
    def fails(folder, *makes):
        (folder / "sandbox.json").write_text("{}")
        raise ValueError("something else is wrong")

    monkeypatch.setattr("whet.runs.commands.record_isolation", fails)
    assert bench.start("train", "run.toml", *SMALL)[0] == 2
    assert folders() == []


def test_an_evaluation_names_its_folder_once_it_has_started(bench):
    status, out, err = bench.start("evaluate", "free.toml", "evaluate.sets.test.path=nothing.jsonl")
    assert status == 2 and "a new run in" not in out + err
    status, out, err = bench.start("evaluate", "free.toml", "evaluate.sets.test.path=train.jsonl")
    assert status == 0 and "a new run in runs/free-" in out, out + err


def test_fresh_renames_the_folder_and_begins_anew(bench):
    assert bench.start("train", "run.toml", "num_rollouts=1")[0] == 0
    log = Path("runs/demo/metrics.jsonl").read_bytes()
    status, out, err = bench.start("train", "run.toml", "num_rollouts=2", "checkpoint.resume=fresh")
    assert status == 0 and "the earlier run in runs/demo is now runs/demo.1" in out + err
    assert Path("runs/demo.1/metrics.jsonl").read_bytes() == log
    assert "resume = true" in Path("runs/demo/config.toml").read_text(), "the next start goes on with it"
    rollouts = [json.loads(line) for line in Path("runs/demo/metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rollouts if "policy/loss" in row]) == 2
    status, out, err = bench.start("train", "run.toml", "num_rollouts=2")
    assert status == 3 and "finished: the run in runs/demo has done all of its 2 rollouts" in err
    status, out, err = bench.start("train", "run.toml", "num_rollouts=2", "checkpoint.resume=false")
    assert status == 2 and "set it to fresh, which renames the folder" in err
