"""Tasks that no file holds: numbered ones, and those of reasoning-gym by a fake of it."""

from __future__ import annotations

import asyncio
import sys

import pytest
from pydantic import ValidationError

from whet.config import ConfigError
from whet.data.own import own_source
from whet.reward import RewardConfig, build_reward
from whet.reward.reasoning_gym import score
from whet.settings.rl import DataConfig
from whet.types import Finish, Message, Outcome, Trajectory, Turn

GYM = """
class Sums:
    def __init__(self, seed, size, most=9):
        self.seed, self.size, self.most = seed, size, most
    def __getitem__(self, i):
        a = (self.seed * 31 + i * 7) % self.most
        return {"question": f"{a}+1?", "answer": str(a + 1), "metadata": {"odd": {1, 2}}}
    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01

def create_dataset(name, **settings):
    return {"sums": Sums}[name](**settings)
"""


@pytest.fixture
def gym(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text(GYM)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("reasoning_gym", None)


def test_numbered_tasks_come_again_under_other_ids():
    source = own_source("numbered", {"size": 3, "prompt": "Play.", "system": "Be brief."}, 5, 60)
    tasks = source.next(5)
    assert len({task.id for task in tasks}) == 5 and len(source) == 3 and source.epoch == 1
    assert tasks[0].prompt == (Message("system", "Be brief."), Message("user", "Play."))
    assert source.find(tasks[4].id) == tasks[4]
    again = own_source("numbered", {"size": 3, "prompt": "Play.", "system": "Be brief."}, 5, 60)
    again.restore(source.state())
    assert again.next(2) == source.next(2)


def reply(task, text):
    turn = Turn((), (), (3,), (-0.5,), (7,), Message("assistant", text), Finish.STOP)
    return Trajectory("t", task, (turn,), Outcome.COMPLETED)


def test_reasoning_tasks_are_scored_by_their_own_generator(gym):
    options = {"dataset": "sums", "size": 4, "config": {"most": 5}}
    task = own_source("reasoning_gym", options, 3, 60).next(1)[0]
    asked = int(task.prompt[1].content.split("+")[0])
    assert task.label == str(asked + 1) and "<answer>" in task.prompt[0].content and asked < 5
    assert score(reply(task, f"It is <answer>0</answer>, no, <answer> {asked + 1} </answer>.")).total == 1.0
    assert score(reply(task, str(asked + 1))).total == 1.0 and score(reply(task, "none")).total == 0.01
    assert score(reply(task, f"<answer>{asked + 1}</answer>"), tag="").total == 0.01


def test_a_row_of_another_source_is_named():
    task = own_source("numbered", {"size": 1}, 0, 60).next(1)[0]
    with pytest.raises(ValueError, match=r'has no metadata "reasoning_gym"; its tasks come from data.source = "reasoning_gym"'):
        score(reply(task, "1"))


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("whet.data.generated.find_spec", lambda name: None)
    monkeypatch.setattr("whet.reward.build.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        own_source("reasoning_gym", {"dataset": "sums"}, 0, 60)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        build_reward(RewardConfig(name="reasoning_gym"))
    with pytest.raises(ValidationError, match="there is no source 'numberd'; choose 'numbered'"):
        DataConfig(source="numberd")


def test_the_reward_runs_on_workers(gym, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = own_source("reasoning_gym", {"dataset": "sums", "size": 2}, 3, 60).next(1)[0]
    reward = build_reward(RewardConfig(name="reasoning_gym", timeout_s=60))
    try:
        assert asyncio.run(reward(reply(task, str(task.label)))).total == 1.0
    finally:
        reward.close()
