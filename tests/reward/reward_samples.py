"""Trajectories to score, and the functions of an imaginary user that score them."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace

from whet.types import Finish, Message, Origin, Outcome, Rewards, Task, ToolCall, Trajectory, Turn


def make_trajectory(text, label="42", task_id="demo/3", **task):
    prompt = (Message("user", "How many?"),)
    call = ToolCall("calculator", {"expression": "6*7"}, "call_0")
    context = (Origin.PROMPT, Origin.PROMPT)
    first = Turn((1, 2), context, (3, 4), (-0.5, -0.25), (7, 7), Message("assistant", "", (call,)), Finish.STOP)
    second = Turn((5,), (Origin.ENVIRONMENT,), (6,), (-0.125,), (8,), Message("assistant", text), Finish.LENGTH)
    return Trajectory(f"{task_id}#0", Task(task_id, prompt, label, **task), (first, second), Outcome.TRUNCATED)


def length(trajectory, scale=1.0):
    return len(trajectory.response) * scale


def echo(trajectory):
    """Returns what its label names."""
    values = {"nan": float("nan"), "inf": float("-inf"), "text": "0.5", "none": None, "list": [1.0], "empty": {}}
    values |= {"dict_nan": {"a": float("nan")}, "dict_text": {"a": 1.0, "why": "good"}}
    values |= {"rewards_text": Rewards(total="1"), "bool": True, "int": 3}
    values |= {"parts": {"correct": 1.0, "format": 0.25}, "total": {"total": 5.0, "correct": 1.0}}
    values |= {"rewards": Rewards(2.0, {"style": 0.5}, "good"), "set": {1}}
    values |= {"keyed": {"score": 1.0, "acc": True, "pred": "42", "total": 7.0}, "keyed_text": {"score": "1"}}
    return values[trajectory.task.label]


async def echo_async(trajectory):
    await asyncio.sleep(0)
    return echo(trajectory)


async def sleep_async(trajectory):
    await asyncio.sleep(600)


async def fail_async(trajectory):
    raise TimeoutError("the judge did not answer")


def hang(trajectory):
    while True:
        pass


def hang_if_asked(trajectory):
    if trajectory.response == "hang":
        hang(trajectory)
    return float(os.getpid())


def hang_with_child(trajectory):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(trajectory.response, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def crash(trajectory):
    print("about to fall over", file=sys.stderr)
    os._exit(7)


def fail(trajectory):
    return {}["missing key"]


def shout(trajectory):
    print('{"value": {"rewards": {"total": 99.0, "components": {}, "detail": ""}}}', flush=True)
    os.write(1, b'{"value": 99}\n' * 20_000)
    sys.stdin.read()
    return 0.5


def devour(trajectory):
    return float(len(bytearray(8 * 2**30)))


def slow_echo(trajectory):
    time.sleep(0.02 * (int(trajectory.response) % 3))
    return float(trajectory.response)


def heavy_modules(trajectory):
    return {name: float(name in sys.modules) for name in ("torch", "transformers")}


class Callable:
    async def __call__(self, trajectory):
        return 0.75


judge = Callable()
not_a_function = 3


def each_token(trajectory):
    """Each sampled token's place in its turn; by the label, something that does not fit."""
    rows = tuple(tuple(float(k) for k in range(len(turn.tokens))) for turn in trajectory.turns)
    return Rewards(0.0, token_rewards=(("7",),) if trajectory.task.label == "3" else rows)


async def each_token_async(trajectory):
    found = each_token(trajectory)
    return replace(found, token_rewards=((0.0,),)) if trajectory.task.label == "2" else found
