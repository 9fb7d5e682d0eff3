"""What leaves the machine: what whet's own source says, and nothing else."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.rollout.metrics import RolloutFailed, require_valid
from whet.runfolder import passed_on
from whet.runfolder.own_source import own_source
from whet.settings.rl import RunConfig
from whet.types import Failure, Group, Outcome, Task, Trajectory


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("first ValueError in env.step: see failures.jsonl", "first ValueError in env.step: see failures.jsonl"),
        ("first Tom in env.step: see failures.jsonl", "first <text of 3 characters> in env.step: see failures.jsonl"),
        ("differs from the start before: torch 2.13.0 (was 2.11.0)", "differs from the start before: <text of 25 characters>"),
        ("failed with RuntimeError: see end.json", "failed with RuntimeError: see end.json"),
        ("step  3/10  reward 0.412  2.1 s (rollout 60%, backward 30%)  eta 3 s", None),
        ("step  3/10  Tom 0.412  sold apples", "step 3/10  <text of 3 characters> 0.412  <text of 4 characters> <text of 6 characters>"),
        ("Tom has 3 apples", "<text of 16 characters>"),
        ("", ""),
        ("  Tom  3", "  <text of 6 characters>"),
        ("  reward  3.5  Tom", "  reward  3.5  <text of 3 characters>"),
        ("x" * 5000, "<text of 5000 characters>"),
    ],
)
def test_lines(text, shown):
    assert " ".join(passed_on.words(text).split()) == " ".join((text if shown is None else shown).split())


def test_a_failed_rollouts_message_loses_the_failures():
    task = Task("t", "what has Tom?")
    failure = Failure("BadThing", "Tom has\n3 apples", "env.step", "Traceback (most recent call last):\nBadThing: Tom has\n3 apples\n")
    with pytest.raises(RolloutFailed) as caught:
        require_valid([Group(task, (Trajectory("t/0", task, (), Outcome.ENV_ERROR, error=failure),))], "rollout 3")
    assert "Tom has" in str(caught.value)
    shown = passed_on.words(str(caught.value))
    assert shown.startswith("rollout <number>: all <number> trajectories failed\n") and "Tom" not in shown and "apples" not in shown


def test_long_texts_are_cut_and_take_no_time():
    sentences = [sentence for each in own_source().sentences.values() for sentence in each]
    most = max(sentences, key=len)
    begin = time.monotonic()
    for text in ("a" * 3999, " ".join(most) * 20, "rollout " * 400, "step 1/1" + "  a b" * 700, "\n" * 10**6):
        assert len(passed_on.words(text)) < 20_000
    assert time.monotonic() - begin < 5


@given(st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=60))
def test_what_passes_is_in_the_source(text):
    marked = f"Qz{text.strip()}qZ".replace("\n", "")
    for template in ("{}", "first {} in {}: see failures.jsonl", "rollout 3: {}", "warning '{}'", "  reward  {}", "step 1/2  {} 3"):
        assert "Qz" not in passed_on.words(template.format(marked, marked))


def test_frames_outside_whet_are_counted():
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/tom/site-packages/whet/loop.py", line 31, in train',
        '    secret = "hunter2"',
        '  File "/home/tom/judge.py", line 2, in hunter2',
        '    raise ValueError("hunter2")',
        '  File "/home/tom/whet/../hunter2.py", line 2, in f',
        "ValueError: hunter2",
        "ValueError",
        "During handling of the above exception, another exception occurred:",
        '  File "C:\\x\\whet\\runfolder\\report.py", line 9, in write_report',
        "Current thread 0x00007f0123456789 (most recent call first):",
        "HunterTwo",
        "hunter2.BadApple.JudgeError",
    ]
    assert passed_on.frames(lines) == [
        *("  whet/loop.py, line 31, in <name>", "  outside whet: 2", "ValueError"),
        "During handling of the above exception, another exception occurred:",
        *("  whet/runfolder/report.py, line 9, in write_report", "A thread, its last call first:"),
    ]


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("whet train a.toml seed=5 deterministic=true", "whet train <text of 6 characters> seed=5 deterministic=true"),
        ("whet train a.toml train.optim.lr=1e-3 algo.name=grpo", "whet train <text of 6 characters> train.optim.lr=0.001 algo.name=grpo"),
        ("whet sft x 'data.path=/home/tom/x'", "whet sft <text of 1 characters> data.path=<text of 11 characters>"),
        ("whet train reward.options.seed=73912", "whet train reward.options.seed=<number>"),
        ("whet train tom.seed=73912 seed=[tom", "whet train <text of 14 characters> seed=<text of 4 characters>"),
        ("unclosed ' seed=5", "<text of 17 characters>"),
    ],
)
def test_commands(command, shown):
    assert passed_on.command(command) == shown


def test_every_declared_key_passes_with_its_default():
    """Whatever a run leaves as it is can be read in its report, but for texts that are not whet's words."""
    given = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"name": "math"}, "seed": 7}
    tree = RunConfig.model_validate(given).model_dump(mode="json", exclude_none=True)

    def compare(value, shown, path):
        if isinstance(value, dict):
            assert value.keys() == shown.keys(), path
            for key, inner in value.items():
                compare(inner, shown[key], (*path, key))
        elif not isinstance(value, str):
            assert value == shown, path

    compare(tree, passed_on.settings(tree), ())


def test_deep_settings_end():
    tree = value = {}
    for _ in range(100_000):
        value["reward"] = value = {}
    assert str(passed_on.settings(tree)).count("reward") < 20
