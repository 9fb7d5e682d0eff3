"""examples/mcp_files with a small server of these tests; tests/agents plays it with the real one."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from tests.e2e.mcp_files_example import EXAMPLE, factory, module, played, solution, tasks, tools
from tests.e2e.tiny_run import make_files, metrics_of
from tests.rollout.scripted import run
from whet.config import load_config
from whet.runs.commands import train
from whet.settings.rl import RunConfig, check_together

SERVER = [sys.executable, "-S", str(Path(__file__).parent / "files_server.py")]


@pytest.fixture(scope="module")
def make():
    return factory(SERVER)


@pytest.mark.parametrize("job", ["find", "write", "change"])
def test_a_job_that_is_done_scores_one_and_one_that_is_not_none(make, job):
    task, done = tasks()[job], module("reward").done
    calls, answer = solution(task)
    trajectory, _ = run(played(make, task, [("", calls), (answer, ())]))
    assert done(trajectory) == 1.0
    assert done(run(played(make, task, [("I know it: 99.", ())]))[0]) == 0.0
    spoiled = ("write_file", {"path": "teams/blue.txt", "content": "Lead: me"})
    assert done(run(played(make, task, [("", [*calls, spoiled]), (answer, ())]))[0]) == 0.0, "nothing else may change"


def test_each_trajectory_has_a_folder_of_its_own_that_goes_with_it(make, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    task = tasks()["write"]
    write = ("write_file", {"path": "answer.txt", "content": "1"})
    read = ("read_text_file", {"path": "answer.txt"})

    async def both():
        first = played(make, task, [("", [write]), ("", [read])])
        return await asyncio.gather(first, played(make, task, [("", [read]), ("", [("list_directory", {"path": "../../.."})])]))

    (one, heard), (two, other) = run(both())
    assert heard[1][0].content == "1" and other[0][0].content.startswith("Error: ")
    assert other[1][0].content == "Error: Access denied"
    assert one.turns[0].notes[0].attachments["files"]["answer.txt"] == "1" and not two.turns[1].notes
    assert list(tmp_path.iterdir()) == []


def test_calls_of_one_reply_are_done_in_their_order(make):
    writes = [("write_file", {"path": "answer.txt", "content": str(number)}) for number in range(6)]
    trajectory, _ = run(played(make, tasks()["write"], [("", writes)]))
    assert [note.attachments["files"]["answer.txt"] for note in trajectory.turns[0].notes] == list("012345")


def test_the_rows_are_right_and_held_out_people_are_others(tmp_path):
    data = module("data")
    data.write_all(tmp_path)
    train, held_out = ((tmp_path / f"{name}.jsonl").read_text() for name in ("train", "held_out"))
    assert (len(train.splitlines()), len(held_out.splitlines())) == (data.NUM_TRAIN, data.NUM_HELD_OUT)
    assert not set(re.findall(r"Name: \w+", train)) & set(re.findall(r"Name: \w+", held_out))


def test_the_settings_for_a_real_model_are_read_and_have_no_comment():
    assert not re.search(r"^ *#", (EXAMPLE / "real.toml").read_text(), re.MULTILINE)
    config = load_config(RunConfig, EXAMPLE / "real.toml", [])
    check_together(config)
    assert config.env.tools[0]["name"].endswith("folder_tools")


@pytest.mark.long
def test_a_run_trains_on_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    make_files(tmp_path)
    module("data").write_all(tmp_path / "runs/mcp_files")
    small = ["num_rollouts=2", "batch.prompts_per_rollout=2", "batch.samples_per_prompt=2", "evaluate.sets.held_out.limit=2"]
    quiet = ["model.device=cpu", "observe.display=none", "checkpoint.interval=none", "stop_after_constant_rewards=none"]
    own = ["model.path=model", "rollout.max_tokens=2048", "rollout.max_turn_tokens=16", f"env.tools={tools(SERVER)}"]
    train(load_config(RunConfig, EXAMPLE / "real.toml", [*small, *quiet, *own]))
    assert len([row for row in metrics_of(tmp_path / "runs/mcp_files/real") if "reward/total" in row]) == 2
