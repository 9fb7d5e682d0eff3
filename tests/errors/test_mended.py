"""What made a run fail is mended, and the same command trains: whatever it was, before the first update and after one, in either mode."""

from __future__ import annotations

import json

import pytest

from tests.errors.error_bench import Bench, make_shared

pytestmark = pytest.mark.long

CODE = """
def score(trajectory):
    {reward}

def look_up(city: str) -> str:
    "Looks a city up."
    {tool}

def asks(text):
    from whet.data.parsers import Parsed
    from whet.types import Message, ToolCall
    return Parsed(Message("assistant", text, (ToolCall("look_up", {{"city": "Rome"}}, "call_0"),)))
"""
GOOD = "return trajectory.turns[0].tokens[0] % 7 / 7"
BAD = "return {}[0]"
SCORED = ("reward.name=mine.py:score",)
MODES = [
    pytest.param((), id="plain"),
    pytest.param(("deterministic=true",), id="deterministic"),
    pytest.param(("control.max_staleness=1",), id="overlapping"),
]
TOOL = ('env.tools=["mine.py:look_up"]', "env.parser=mine.py:asks", *SCORED)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return make_shared(tmp_path_factory.mktemp("mended"))


def code(bench: Bench, reward: str = GOOD, tool: str = "return 'old'") -> None:
    bench.file("mine.py", CODE.format(reward=reward, tool=tool))


def rows(bench: Bench, name: str, column: str, *labels: str | None) -> None:
    lines = [json.dumps({"prompt": f"What is {i}+3?", column: label}) for i, label in enumerate(labels)]
    bench.file(name, "\n".join(lines) + "\n")


def break_reward(bench: Bench):
    code(bench, reward=BAD)
    return "run.toml", SCORED, lambda: code(bench) or SCORED


def break_tool(bench: Bench):
    code(bench, tool=BAD)
    return "tools.toml", TOOL, lambda: code(bench) or TOOL


def break_limit(bench: Bench):
    code(bench)
    return "run.toml", (*SCORED, "rollout.max_tokens=12"), lambda: SCORED


def break_name(bench: Bench):
    code(bench, reward=BAD)
    return "run.toml", SCORED, lambda: ("reward.name=exact", "stop_after_constant_rewards=none")


def break_label_key(bench: Bench):
    """A reward of the user's that needs a label, and a column that has none of it."""
    code(bench, reward="return len(trajectory.task.label) + trajectory.turns[0].tokens[0] % 7 / 7")
    lines = [json.dumps({"prompt": f"What is {i}+3?", "answer": "x", "label": None}) for i in range(4)]
    bench.file("my.jsonl", "\n".join(lines) + "\n")
    return "run.toml", (*SCORED, "data.train=my.jsonl"), lambda: (*SCORED, "data.train=my.jsonl", "data.label_key=answer")


def break_helper(bench: Bench):
    """The reward is as it was; what it imports is mended."""
    bench.file("helper.py", "def value(trajectory):\n    return {}[0]\n")
    code(bench, reward="import helper\n    return helper.value(trajectory)")

    def mend():
        bench.file("helper.py", f"def value(trajectory):\n    {GOOD}\n")
        return SCORED

    return "run.toml", SCORED, mend


@pytest.mark.parametrize("more", MODES)
@pytest.mark.parametrize("broken", [break_reward, break_tool, break_limit, break_name, break_label_key, break_helper])
def test_the_same_command_trains_once_it_is_mended(broken, more, shared, tmp_path):
    with Bench.open(shared, tmp_path / "home", fresh=True) as bench:
        config, arguments, mend = broken(bench)
        for _ in range(2):
            told = bench.refused(*arguments, *more, "num_rollouts=2", config=config)
            assert told.status == 2 and "all 8 trajectories failed" in told.message, told.message
        assert not (bench.folder / "runs/demo/checkpoints").exists()
        bench.mended(*mend(), *more, "num_rollouts=2")
        assert len(bench.updates()) == 2


@pytest.mark.parametrize("more", MODES)
@pytest.mark.parametrize("broken", [break_reward, break_tool, break_limit])
def test_after_an_update_too(broken, more, shared, tmp_path):
    with Bench.open(shared, tmp_path / "home", fresh=True) as bench:
        config, arguments, mend = broken(bench)
        good = mend()
        assert bench.start("train", config, *good, *more, "num_rollouts=1")[0] == 0
        broken(bench)
        told = bench.refused(*arguments, *more, "num_rollouts=2", config=config)
        assert told.status == 2 and "failed" in told.message, told.message
        bench.mended(*mend(), *more, "num_rollouts=2")
        assert len(bench.updates()) == 2


def test_a_label_that_cannot_be_read_is_told_before_anything_is_sampled_and_its_correction_is_taken(shared, tmp_path):
    """Of training and of an evaluation set, by `whet train`, `whet evaluate`, `whet generate` and `whet check`; after an update, too."""
    with Bench.open(shared, tmp_path / "home", fresh=True) as bench:
        rows(bench, "my.jsonl", "label", "1", "2", "3", r"\sum_{i=1}^n i", "()")
        rows(bench, "test.jsonl", "label", "1", None)
        good = ("reward.name=math", "data.train=my.jsonl", "stop_after_constant_rewards=none")
        for command in ("train", "generate", "check"):
            status, out, err = bench.start(command, "run.toml", *good, *(("--output", "out") if command == "generate" else ()))
            assert status == 2 and "my.jsonl:4" in out + err and "my.jsonl:5" in out + err, out + err
        assert not (bench.folder / "out").exists()
        rows(bench, "my.jsonl", "label", "1", "2", "3", "4", "5")
        for command in ("train", "evaluate", "check"):
            status, out, err = bench.start(command, "run.toml", *good, "evaluate.sets.test.path=test.jsonl")
            assert status == 2 and "test.jsonl:2" in out + err, out + err
        bench.mended(*good, "num_rollouts=1")
        rows(bench, "my.jsonl", "label", "corrected", "2", "3", "4", "5")
        bench.mended(*good, "num_rollouts=2")
        assert len(bench.updates()) == 2
