"""examples/openai_agents: its rows, its reward and its settings; tests/agents plays it with the real package."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from whet.config import load_config
from whet.settings.rl import RunConfig, check_together
from whet.types import Finish, Message, Outcome, Task, Trajectory, Turn, TurnNote

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/openai_agents"
ROOT = EXAMPLE.parents[1]


@pytest.fixture
def data():
    return runpy.run_path(str(EXAMPLE / "data.py"))


def test_held_out_questions_are_about_other_orders_and_all_have_their_order_s_answer(data):
    orders, found = data["all_orders"](), data["rows"]()
    numbers = {name: {number for row in rows for number in re.findall(r"\d{4}", row["prompt"])} for name, rows in found.items()}
    assert not numbers["train"] & numbers["held_out"] and len(numbers["train"]) == 4 * len(numbers["held_out"])
    for row in found["train"] + found["held_out"]:
        number = re.search(r"\d{4}", row["prompt"])
        assert number is None or row["label"] in orders[number[0]].values()
        assert row["label"] not in row["metadata"]["others"]


@pytest.mark.parametrize(
    ("printed", "score"),
    [("It goes to Ghent.\n", 1), ("ghent", 1), ("Ghent, Lyon or Porto", 0), ("Ghentish", 0), ("Lyon", 0), ("", 0)],
)
def test_the_reward_reads_what_the_program_printed(printed, score):
    answered = runpy.run_path(str(EXAMPLE / "reward.py"))["answered"]
    task = Task("t", (Message("user", "To which city?"),), "Ghent", {"others": ["Lyon", "Porto"]})
    note = TurnNote("", {}, {"exit": 0, "stdout": printed, "stderr": ""})
    turn = Turn((), (), (3,), (-0.5,), (7,), Message("assistant", "Ghent"), Finish.STOP, notes=(note,))
    trajectory = Trajectory("t/0", task, (turn,), Outcome.COMPLETED)
    assert answered(trajectory) == score
    assert answered(replace(trajectory, outcome=Outcome.TRUNCATED)) == 0


def test_the_settings_for_a_real_model_are_read_and_have_no_comment(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not re.search(r"^ *#", (EXAMPLE / "real.toml").read_text(), re.MULTILINE)
    config = load_config(RunConfig, EXAMPLE / "real.toml", [])
    check_together(config)
    assert Path(config.env.options["command"][1]).exists()
