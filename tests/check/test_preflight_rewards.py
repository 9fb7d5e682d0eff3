"""Rewards, tried out on one row."""

import re
import time
from pathlib import Path

import pytest

from tests.check.small_run import look, module, of, write_rows
from whet.check import rewards

pytestmark = pytest.mark.long

AREAS = ("model", "tokenizer", "environment", "data", "evaluation", "reward")
REWARDS = """
import asyncio, os, time
def right(trajectory, bonus=0.0):
    return {"right": float(trajectory.response == trajectory.task.label), "bonus": bonus}
def constant(trajectory):
    return 0.5
def raises(trajectory):
    return trajectory.task.metadata["gone"]
def nan(trajectory):
    return float("nan")
def text(trajectory):
    return "good"
def hangs(trajectory):
    time.sleep(60)
def dies(trajectory):
    os._exit(3)
async def waits(trajectory):
    await asyncio.sleep(60)
def ranks(trajectories):
    return [float(t.response == t.task.label) + (0.0 if t.rewards is None else 10 * t.rewards.total) for t in trajectories]
def misses_one(trajectories):
    return [0.0]
async def blocks(trajectory):
    time.sleep(6)
def tells_its_process(trajectory):
    open("pid", "w").write(str(os.getpid()))
    return float(len(trajectory.response))
"""


@pytest.fixture
def user(here):
    return module(here, "rewards.py", REWARDS)


def test_the_label_and_an_empty_reply_are_scored_for_training_and_every_set(here):
    findings, _ = look(*AREAS)
    assert of(findings, "reward", "ok") == [
        "train.jsonl:1: the reply '0' scores 1, an empty one 0",
        "the labels of 12 rows can be used",
        "test: test.jsonl:1: the reply '0' scores 1, an empty one 0",
        "test: the labels of 2 rows can be used",
    ]


@pytest.mark.parametrize(("extract", "reply"), [("boxed", "\\boxed{0}"), ("hash", "#### 0"), ("last_number", "0"), ("whole", "0")])
def test_the_form_that_a_reward_wants_is_found(here, extract, reply):
    texts = of(look(*AREAS, overrides=[f"reward.options.extract={extract}"])[0], "reward", "ok")
    assert f"the reply {reply!r} scores 1, an empty one 0" in texts[0]


def test_parts_of_a_users_reward_are_shown(user, here):
    texts = of(look(*AREAS, overrides=[f"reward.name={user}:right", "reward.options.bonus=0.25"])[0], "reward")
    assert texts[0] == "train.jsonl:1: the reply '0' scores 1.25 (right 1, bonus 0.25), an empty one 0.25 (right 0, bonus 0.25)"
    assert not any("labels of" in text for text in texts), "a user's function is not run on every row"


def test_a_reward_that_cannot_tell_replies_apart_is_told(user, here):
    findings, _ = look(*AREAS, overrides=[f"reward.name={user}:constant"])
    warned = of(findings, "reward", "warn")
    assert len(warned) == 2 and "its label '0' as the reply and an empty reply both score 0.5" in warned[0]
    assert "may be constant" in warned[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"KeyError: 'gone' \(at .*rewards.py:8 in raises\)"),
        ("nan", r"the reward is nan; it must be finite"),
        ("text", r"the reward is 'good' \(str\); return a float"),
        ("hangs", r"took longer than 0.5 s \(reward.timeout_s\); its worker was killed"),
        ("dies", r"worker died"),
        ("waits", r"took longer than 0.5 s"),
        ("gone", r"has no 'gone'"),
    ],
)
def test_rewards_that_break_fail_with_their_place(user, here, name, words):
    findings, _ = look(*AREAS, overrides=[f"reward.name={user}:{name}", "reward.timeout_s=0.5", "evaluate.sets.test.reward.name=math"])
    fails = of(findings, "reward", "FAIL")
    assert len(fails) == 1 and re.search(words, fails[0]), fails
    assert "test: the labels of 2 rows can be used" in of(findings, "reward", "ok"), "the other sets are looked at all the same"


def test_a_coroutine_that_blocks_is_left_behind(user, here, monkeypatch):
    monkeypatch.setattr(rewards, "START_TIMEOUT_S", 0.0)
    (here / "run.toml").write_text((here / "run.toml").read_text().replace(', sets = { test = { path = "test.jsonl", limit = 2 } }', ""))
    began = time.monotonic()
    fails = of(look(*AREAS, overrides=[f"reward.name={user}:blocks", "reward.timeout_s=0.1"])[0], "reward", "FAIL")
    assert len(fails) == 1 and re.search(r"took longer than [\d.]+ s \(at .*rewards.py:\d+ in blocks\)", fails[0]), fails
    assert time.monotonic() - began < 60


def test_the_workers_are_gone_afterwards(user, here):
    look(*AREAS, overrides=[f"reward.name={user}:tells_its_process"])
    process = Path("/proc") / Path("pid").read_text()
    assert not process.exists()


def test_labels_that_the_reward_cannot_use_are_counted_with_their_places(here):
    write_rows(here / "train.jsonl", [{"prompt": "q", "label": "1"}, {"prompt": "q", "label": "\\frac{"}, {"prompt": "q", "label": None}])
    fails = of(look(*AREAS)[0], "reward", "FAIL")
    first, *more = fails[0].splitlines()
    assert first == "the labels of 2 of 3 rows cannot be used" and "train.jsonl:2" in more[0] and "train.jsonl:3" in more[1]


def test_a_row_without_a_label_is_scored_with_nothing_to_compare(user, here):
    write_rows(here / "train.jsonl", [{"prompt": "q"}])
    texts = of(look(*AREAS, overrides=[f"reward.name={user}:constant"])[0], "reward", "ok")
    assert texts[0] == "an empty reply scores 0.5; train.jsonl:1 has no label to compare with"


def test_an_environment_that_brings_the_labels_is_asked_for_them(here):
    path = here / "labels.py"
    path.write_text(
        "from dataclasses import replace\n"
        "class Labels:\n    tools = ()\n    async def step(self, reply): ...\n    async def close(self): ...\n"
        "    async def start(self, task):\n        return replace(task, label='42')\n"
    )
    write_rows(here / "train.jsonl", [{"prompt": "q"}])
    write_rows(here / "test.jsonl", [{"prompt": "q"}])
    findings, _ = look(*AREAS, overrides=[f"env.name={path}:Labels", "env.tools=[]"])
    assert of(findings, "reward") == [
        "train.jsonl:1: the reply '42' scores 1, an empty one 0",
        "test: test.jsonl:1: the reply '42' scores 1, an empty one 0",
    ], "the labels of the rows are not what counts"


GAME = """
from pathlib import Path
from whet.env.base import Step
class Game:
    tools = ()
    async def start(self, task):
        self.label = task.label
        return task
    async def step(self, reply):
        with open("steps", "a") as file:
            file.write(reply.message.content + ";")
        return Step(done=True, reward=2.0 * (reply.message.content == self.label), counts={"moves": 1})
    async def close(self):
        pass
def won(trajectory):
    return 1.0 * trajectory.turns[-1].reward + trajectory.counts["moves"]
"""


def test_a_reward_that_reads_what_the_environment_gives_gets_it_on_request(here):
    game = module(here, "game.py", GAME)
    settings = [f"env.name={game}:Game", "env.tools=[]", f"reward.name={game}:won"]
    fails = of(look(*AREAS, overrides=settings)[0], "reward", "FAIL")
    assert "TypeError" in fails[0] and fails[0].splitlines()[1:] == [rewards.UNASKED] and not (here / "steps").exists()
    findings, _ = look(*AREAS, overrides=settings, calls_tools=True)
    assert of(findings, "reward") == [
        "train.jsonl:1: the reply '0' scores 3, an empty one 1",
        "test: test.jsonl:1: the reply '0' scores 3, an empty one 1",
    ]
    assert (here / "steps").read_text() == ";0;;0;"


def test_without_rows_nothing_is_scored(here):
    (here / "train.jsonl").unlink()
    findings, _ = look(*AREAS)
    assert of(findings, "reward", "skip") == ["not scored: needs the rows"]
    assert "test: the labels of 2 rows can be used" in of(findings, "reward", "ok")


def test_siblings_are_scored_together_after_each_by_itself(here, user):
    findings, _ = look(*AREAS, overrides=[f"reward.group.name={user}:ranks", "reward.name=math"])
    assert "train.jsonl:1: as siblings, an empty reply scores 0, the reply '0' 11" in of(findings, "reward", "ok")
    findings, _ = look(*AREAS, overrides=[f'reward={{group={{name="{user}:ranks"}}}}'])
    assert of(findings, "reward", "ok")[0] == "train.jsonl:1: as siblings, an empty reply scores 0, the reply '0' 1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("misses_one", "it returned 1 scores for 2 trajectories; return one for each, in their order"),
        ("right", "reward of the group"),
        ("gone", "has no 'gone'"),
    ],
)
def test_a_reward_of_siblings_that_cannot_be_is_told(here, user, name, words):
    findings, _ = look(*AREAS, overrides=[f"reward.group.name={user}:{name}"])
    assert words in of(findings, "reward", "FAIL")[0]


def test_a_reward_that_an_environment_gives_is_not_tried_on_a_reply(here):
    path = here / "agent.py"
    path.write_text("async def agent(task, endpoint):\n    return 1.0\n")
    env = ["env.name=program", f"env.options.function={path}:agent", "env.tools=[]"]
    findings, _ = look(*AREAS, overrides=[*env, "reward={name='environment'}"])
    texts = of(findings, "reward")
    assert texts[0] == "the reward environment is what the environment gives as it is played, so no reply is tried here"
    assert not of(findings, "reward", "fail") and not of(findings, "environment", "fail")
