import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reward import reward_samples
from tests.reward.reward_samples import make_trajectory
from whet.reward import RewardConfig, RewardError, RewardTimeout, build_reward
from whet.reward.pool import WorkerPool
from whet.types import Failure, Message, Rewards, ToolCall
from whet.types.json_codec import trajectory_from_json, trajectory_to_json

FUNCTIONS = reward_samples.__file__


def reference(name):
    return f"{FUNCTIONS}:{name}"


def build(name, **settings):
    return build_reward(RewardConfig(name=reference(name), **settings))


def run_once(name, text="hello", label="42", **settings):
    reward = build(name, **settings)
    try:
        return asyncio.run(reward(make_trajectory(text, label)))
    finally:
        reward.close()


def is_alive(pid):
    """Whether a process runs; one that ended and only waits to be reaped by someone else does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_trajectory_survives_the_wire():
    trajectory = make_trajectory("x", metadata={"level": [1, {"a": None}]}, tools=({"type": "function"},))
    (first, second), nucleus = trajectory.turns, (b"", b"\x01\0\0\0\xff\0\0\0")
    trajectory = replace(
        trajectory,
        rewards=Rewards(1.0, {"a": 0.5}, "why", ((0.25, -1.0), (0.0,))),
        error=Failure("E", "m", "w", "t"),
        timings={"env": 0.5},
        turns=(replace(first, token_rewards=(0.0, 1.0), nucleus=nucleus, reward=2.0, restart=True), second),
    )
    assert trajectory_from_json(json.loads(json.dumps(trajectory_to_json(trajectory)))) == trajectory
    call = ToolCall("add", {"a": 1}, "c1", '{"a":1}')
    asked = replace(trajectory, task=replace(trajectory.task, prompt=(Message("assistant", "so", (call,), reasoning_content="hm"),)))
    (message,) = trajectory_from_json(json.loads(json.dumps(trajectory_to_json(asked)))).task.prompt
    assert message.tool_calls == (call,) and message.tool_calls[0].text == call.text and message.reasoning_content == "hm"
    light = trajectory_from_json(trajectory_to_json(trajectory, bulky=False))
    assert light.turns[0] == replace(trajectory.turns[0], nucleus=None)


def test_a_function_and_its_options():
    assert run_once("length", "hello", options={"scale": 0.5}) == Rewards(2.5, {"length": 2.5})


@pytest.mark.parametrize("name", ["echo", "echo_async"])
def test_the_forms_a_score_may_have(name):
    reward = build(name)
    expected = {
        "int": Rewards(3.0, {name: 3.0}),
        "bool": Rewards(1.0, {name: 1.0}),
        "parts": Rewards(1.25, {"correct": 1.0, "format": 0.25}),
        "total": Rewards(5.0, {"correct": 1.0}),
        "rewards": Rewards(2.0, {"style": 0.5}, "good"),
    }
    for label, rewards in expected.items():
        assert asyncio.run(reward(make_trajectory("x", label))) == rewards
    reward.close()


@pytest.mark.parametrize("name", ["echo", "echo_async"])
def test_what_is_no_score_names_function_task_and_value(name):
    reward = build(name)
    named = rf"{name}' on task 'demo/3': "
    for label, value in {
        "nan": "nan",
        "inf": "-inf",
        "text": r"'0\.5' \(str\)",
        "none": r"None \(NoneType\)",
        "list": r"\[1\.0\]",
        "set": r"\{1\}",
        "empty": "empty mapping",
        "dict_nan": "component 'a' is nan",
        "dict_text": r"component 'why' is 'good' \(str\).*reward\.score_key",
        "rewards_text": "total is '1'",
    }.items():
        with pytest.raises(RewardError, match=f"{named}.*{value}") as error:
            asyncio.run(reward(make_trajectory("x", label)))
        assert not isinstance(error.value, RewardTimeout)
    reward.close()


def test_an_exception_keeps_its_type_place_and_traceback():
    message = r"fail' on task 'demo/3': KeyError: 'missing key' .*reward_samples\.py:\d+ in fail"
    with pytest.raises(RewardError, match=message) as error:
        run_once("fail")
    (note,) = error.value.__notes__
    assert note.startswith("Traceback") and 'return {}["missing key"]' in note
    assert "whet/reward" not in note, "frames of the plumbing tell the user nothing"


def test_an_async_function_fails_and_expires_as_different_errors():
    with pytest.raises(RewardError, match="fail_async' on task 'demo/3': TimeoutError: the judge did not") as error:
        run_once("fail_async")
    assert not isinstance(error.value, RewardTimeout)
    with pytest.raises(RewardTimeout, match=r"sleep_async' on task 'demo/3' took longer than 0\.05 s"):
        run_once("sleep_async", timeout_s=0.05)
    assert run_once("judge").total == 0.75


def test_a_hang_is_killed_and_its_worker_replaced():
    reward = build("hang_if_asked", timeout_s=0.5)
    before = asyncio.run(reward(make_trajectory("go"))).total
    with pytest.raises(RewardTimeout, match=r"hang_if_asked' on task 'demo/3' took longer than 0\.5 s"):
        asyncio.run(reward(make_trajectory("hang")))
    assert not is_alive(int(before))
    after = asyncio.run(reward(make_trajectory("go"))).total
    assert after != before and is_alive(int(after))
    reward.close()
    assert not is_alive(int(after))


def test_a_kill_reaches_what_the_function_started(tmp_path):
    with pytest.raises(RewardTimeout):
        run_once("hang_with_child", str(tmp_path / "pid"), timeout_s=1.0)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(child))


def test_a_crash_reports_its_exit_code_and_last_words():
    message = r"crash' on task 'demo/3': its worker died \(exit code 7\).*about to fall over"
    with pytest.raises(RewardError, match=message):
        run_once("crash")


def test_memory_is_limited():
    with pytest.raises(RewardError, match="devour' on task 'demo/3': MemoryError"):
        run_once("devour", worker_memory_mb=1024)


def test_prints_and_writes_to_stdout_cannot_forge_a_reward():
    reward = build("shout")
    for _ in range(2):
        assert asyncio.run(reward(make_trajectory("x"))).total == 0.5
    reward.close()


def test_the_worker_is_light():
    assert run_once("heavy_modules").components == {"torch": 0.0, "transformers": 0.0}


def test_more_calls_than_workers_queue_up_and_keep_their_order():
    reward = build("slow_echo", workers=2)

    async def score_all():
        return await asyncio.gather(*(reward(make_trajectory(str(i))) for i in range(24)))

    assert [rewards.total for rewards in asyncio.run(score_all())] == [float(i) for i in range(24)]
    assert len(reward._pool.pids) == 2
    reward.close()


def test_waiting_for_a_worker_does_not_count_against_a_call():
    reward = build("hang_if_asked", timeout_s=0.6)

    async def score_all():
        calls = (reward(make_trajectory(text)) for text in ("hang", "hang", "go"))
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second, third = asyncio.run(score_all())
    assert isinstance(first, RewardTimeout) and isinstance(second, RewardTimeout) and isinstance(third, Rewards)
    reward.close()


def test_close_ends_calls_processes_and_descriptors():
    descriptors = len(os.listdir("/proc/self/fd"))
    reward = build("hang", workers=2, timeout_s=600)

    async def close_meanwhile():
        calls = [asyncio.create_task(reward(make_trajectory("x"))) for _ in range(3)]
        while len(reward._pool.pids) < 2:
            await asyncio.sleep(0.01)
        pids = reward._pool.pids
        await asyncio.to_thread(reward.close)
        return pids, await asyncio.gather(*calls, return_exceptions=True)

    pids, results = asyncio.run(close_meanwhile())
    assert all(isinstance(result, RewardError) for result in results)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # reaped, not only ended
    assert reward._pool.pids == [] and len(os.listdir("/proc/self/fd")) == descriptors
    reward.close()
    with pytest.raises(RewardError, match="the pool is closed"):
        asyncio.run(reward(make_trajectory("x")))


def test_workers_end_with_their_parent():
    code = (
        "import asyncio\n"
        "from tests.reward.test_reward_function import build, make_trajectory\n"
        "reward = build('hang_if_asked', timeout_s=600)\n"
        "print(int(asyncio.run(reward(make_trajectory('go'))).total), flush=True)\n"
        "asyncio.run(reward(make_trajectory('hang')))\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(worker))


def test_a_weighted_sum_keeps_its_components_and_reasons():
    config = RewardConfig(
        components={
            "correct": {"name": "math"},
            "length": {"name": reference("length"), "weight": -0.5, "options": {"scale": 2}},
            "style": {"name": reference("echo"), "weight": 0.25},
        }
    )
    reward = build_reward(config)
    rewards = asyncio.run(reward(make_trajectory("nonsense", "parts")))
    expected = {"correct": 0.0, "length": 16.0, "style": 1.25, "style/correct": 1.0, "style/format": 0.25}
    assert rewards.components == expected
    assert rewards.total == 0.0 - 8.0 + 0.3125
    assert rewards.detail == "correct: the reply has no answer (extract = auto)"
    with pytest.raises(RewardError, match="echo' on task"):
        asyncio.run(reward(make_trajectory("1", "text")))
    reward.close()


def test_token_rewards_of_several_components_are_added_with_their_weights():
    parts = {name: {"name": reference(name), "weight": weight} for name, weight in (("each_token", 2.0), ("each_token_async", -1.0))}
    parts["length"] = {"name": reference("length")}
    trajectory = make_trajectory("x", "1")
    reward = build_reward(RewardConfig.model_validate({"components": parts}))
    rewards = asyncio.run(reward(trajectory))
    assert rewards.token_rewards == tuple(tuple(2.0 * k - 1.0 * k for k in range(len(turn.tokens))) for turn in trajectory.turns)
    with pytest.raises(RewardError, match="rows of different lengths"):
        asyncio.run(reward(make_trajectory("x", "2")))
    with pytest.raises(RewardError, match=r"each_token' on task 'demo/3': token_rewards\[0\]\[0\] is '7'"):
        asyncio.run(reward(make_trajectory("x", "3")))
    reward.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "math", "components": {"a": {"name": "exact"}}}, r"name = 'math' and reward\.components \(a\)"),
        ({}, "no reward is set"),
        ({"components": {"a": {"name": "exact"}}, "options": {"casefold": True}}, r"reward\.options"),
        ({"name": "math", "timeout_s": 0}, "timeout_s"),
        ({"name": "math", "workers": 0}, "workers"),
        ({"name": "math", "options": {"extrct": 1}}, "^the options of the reward 'math': extrct: unknown key; did you mean extract"),
        ({"name": "math", "options": {"extract": "bx"}}, "^the options of the reward 'math': extract = \"bx\": expected one of 'auto', "),
        ({"name": "maths"}, "there is no reward 'maths'; did you mean math; there are 'math', 'exact'"),
        ({"name": "whet.reward.base:nothing"}, "has no 'nothing'"),
        ({"name": reference("not_a_function")}, "is a int, not a function"),
        ({"name": reference("length"), "options": {"scael": 1}}, r"f\(trajectory, scael=\.\.\.\)"),
    ],
)
def test_a_wrong_configuration_is_an_error_at_the_start(settings, message):
    with pytest.raises(ValueError, match=message):
        build_reward(RewardConfig(**settings))


def test_what_json_cannot_carry_is_an_error_that_names_the_task():
    reward = build("length")
    with pytest.raises(RewardError, match=r"length' on task 'demo/3'.*JSON.*complex"):
        asyncio.run(reward(make_trajectory("x", metadata={"z": 1j})))
    reward.close()


def test_a_worker_that_cannot_start_says_why():
    pool = WorkerPool(1, timeout_s=5.0, preload=["whet.reward.base:nothing"])
    with pytest.raises(RewardError, match=r"starting a reward worker.*nothing"):
        asyncio.run(pool.call("math:sqrt", {}, "a call"))
    assert pool.pids == []
    pool.close()


@pytest.mark.parametrize("name", ["echo", "echo_async"])
def test_an_entry_of_a_mapping_may_be_the_reward(name):
    found = run_once(name, label="keyed", score_key="score")
    assert (found.total, found.components) == (1.0, {"score": 1.0, "acc": 1.0, "total": 7.0})
    assert run_once(name, label="int", score_key="score").total == 3.0
    for label, reason in (("parts", r"without 'score' \(reward.score_key\)"), ("keyed_text", "the entry 'score' is '1'")):
        with pytest.raises(RewardError, match=reason):
            run_once(name, label=label, score_key="score")
