"""A run in which the environment never answers one task: every step goes on, also after a stop, and the task has one outcome in the end."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.e2e.test_stop import ask_at
from tests.e2e.tiny_run import QUESTIONS, checkpoints_of, make_files, metrics_of, run_config
from whet.engine.embedded.core import EngineCore
from whet.observe.records import read_records
from whet.runs.commands import train
from whet.stop import Stopped

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]

STUCK = f"""
import asyncio
from pathlib import Path
from whet.env.base import SingleTurn

FILE = Path(__file__).with_suffix(".txt")

class Stuck(SingleTurn):
    async def start(self, task):
        if {QUESTIONS[1]!r} in str(task.prompt):
            if not FILE.exists():
                FILE.write_text(task.id)
            if FILE.read_text() == task.id:
                await asyncio.Event().wait()
        return task
"""


def test_one_task_that_never_returns_delays_no_step_also_after_a_stop_and_has_one_outcome(tmp_path, monkeypatch, stop):
    make_files(tmp_path)
    (tmp_path / "stuck.py").write_text(STUCK)

    def config(num_rollouts, timeout_s):
        return run_config(
            tmp_path, "run", deterministic=False, num_rollouts=num_rollouts, env={"name": f"{tmp_path / 'stuck.py'}:Stuck"},
            control={"max_staleness": 1, "max_error_rate": 1}, rollout={"timeout_s": timeout_s}, checkpoint={"interval": 1, "keep": 2},
        )  # fmt: skip

    with monkeypatch.context() as patch:
        ask_at(patch, EngineCore, "step", stop, 30)
        with pytest.raises(Stopped):
            train(config(6, None))  # nothing but the schedule keeps the task from holding up a step
    before = len([row for row in metrics_of(tmp_path / "run") if "policy/loss" in row])
    stop._number = None
    train(config(6, None))
    assert before < len([row for row in metrics_of(tmp_path / "run") if "policy/loss" in row]) == 6
    stuck, newest = (tmp_path / "stuck.txt").read_text(), tmp_path / "run/checkpoints" / checkpoints_of(tmp_path / "run")[-1]
    assert stuck not in {row["task_id"] for row in read_records(tmp_path / "run/rollouts")}
    held = json.loads((newest / "state.json").read_text())["others"]["rollouts"]["group_runs"]
    assert [play["task"] for play in held].count(stuck) == 1

    train(config(8, 8.0))  # other settings: the task begins anew, and the last rollout of two waits for it
    rows = [row for row in read_records(tmp_path / "run/rollouts") if row["task_id"] == stuck]
    assert Counter((row["trajectory"], row["outcome"]) for row in rows) == {(f"{stuck}/{k}", "timeout"): 1 for k in range(3)}
