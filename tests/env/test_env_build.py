"""From the configuration to environments."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError

from whet.config import ConfigError
from whet.data.formats.hermes import parse_hermes
from whet.env import build
from whet.env.base import Env, SingleTurn, Step
from whet.env.build import EnvConfig, build_env_factory
from whet.env.tool_env import ToolEnv
from whet.types import Task

MODULE = """
class Riddle:
    tools = ()
    def __init__(self, answer, hints=0):
        self.answer, self.hints = answer, hints
    async def start(self, task):
        return task
    async def step(self, reply):
        ...
    async def close(self):
        pass

def halves(answer):
    return object()

def unlucky():
    return {}["luck"]

def shout(text: str) -> str:
    "Loudly."
    return text.upper()

import threading
running, peak, lock, barriers = [], [0], threading.Lock(), {}

def together(parties: int) -> str:
    "Waits until so many are at work, and tells how many there ever were."
    with lock:
        running.append(1)
        peak[0] = max(peak[0], len(running))
        barrier = barriers.setdefault(parties, threading.Barrier(parties))
    barrier.wait(30)
    with lock:
        running.pop()
    barrier.wait(30)
    return str(peak[0])

number = 3
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "my_env.py"
    path.write_text(MODULE)
    return str(path)


def test_the_default_is_a_plain_question():
    env = build_env_factory(EnvConfig())()
    assert isinstance(env, SingleTurn) and isinstance(env, Env) and env.tools == ()
    task = Task("t", "q")
    assert asyncio.run(env.start(task)) is task
    assert asyncio.run(env.step(parse_hermes("a"))) == Step(done=True)


def test_tools_by_name_and_reference(module):
    make = build_env_factory(EnvConfig(name="tools", tools=["calculator", f"{module}:shout"], max_reply_chars=100))
    first, second = make(), make()
    assert isinstance(first, ToolEnv) and first is not second
    assert [tool["function"]["name"] for tool in first.tools] == ["calculator", "shout"]
    call = '<tool_call>{"name": "shout", "arguments": {"text": "%s"}}</tool_call>'
    answer = asyncio.run(first.step(parse_hermes(call % "a" + call % ("b" * 200))))
    assert answer.messages[0].content == "A"
    assert len(answer.messages[1].content) <= 100


def test_the_settings_reach_the_environment(module):
    make = build_env_factory(EnvConfig(name="tools", tools=["calculator"], max_calls_per_turn=1))
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    assert [m.content[:5] for m in asyncio.run(make().step(parse_hermes(call * 2))).messages] == ["2", "Error"]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_calls_of_all_trajectories_wait_for_a_thread(module, limit, monkeypatch):
    monkeypatch.setattr(build, "MAX_TOOL_THREADS", limit)
    make = build_env_factory(EnvConfig(name="tools", tools=[f"{module}:together"]))
    arguments = f'{{"parties": {limit}}}'
    call = parse_hermes(f'<tool_call>{{"name": "together", "arguments": {arguments}}}</tool_call>')

    async def main():
        return await asyncio.gather(*(make().step(call) for _ in range(6)))

    assert max(int(step.messages[0].content) for step in asyncio.run(main())) == limit


def test_a_class_of_the_user_s(module):
    make = build_env_factory(EnvConfig(name=f"{module}:Riddle", options={"answer": "42"}))
    env = make()
    assert (env.answer, env.hints) == ("42", 0)  # pyright: ignore
    assert make() is not env


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"name": "tool"}, "no environment 'tool'; choose 'single_turn', 'tools'"),
        ({"tools": ["calculator"]}, "env.tools belongs to env.name = \"tools\" or \"simulated_user\", not to 'single_turn'"),
        ({"name": "tools"}, "needs env.tools: a list of 'calculator'"),
        ({"name": "tools", "tools": ["abacus"]}, "no tool 'abacus'; choose 'calculator'"),
        ({"options": {"a": 1}}, "'single_turn' takes none"),
        ({"tool_timeout_s": 0}, "greater than 0"),
        ({"max_reply_chars": 10}, "greater than or equal to 100"),
    ],
)
def test_a_config_that_does_not_fit_together_is_refused(keys, what):
    with pytest.raises(ValidationError, match=what):
        EnvConfig(**keys)


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("Riddle", {}, r"cannot be called as f\(\): missing a required argument: 'answer'"),
        ("Riddle", {"answer": 1, "hint": 2}, r"f\(answer=..., hint=...\): got an unexpected keyword"),
        ("number", {}, "is a int, not a function or class"),
        ("Ridle", {}, "has no 'Ridle'; did you mean Riddle"),
    ],
)
def test_a_reference_that_does_not_fit_is_refused(module, name, options, what):
    with pytest.raises((ValueError, ConfigError), match=what):
        build_env_factory(EnvConfig(name=f"{module}:{name}", options=options))


def test_what_is_no_environment_is_named(module):
    make = build_env_factory(EnvConfig(name=f"{module}:halves", options={"answer": 1}))
    with pytest.raises(ValueError, match="made a object, which has no tools, start, step, close"):
        make()


def test_an_environment_that_cannot_be_made_says_where(module):
    make = build_env_factory(EnvConfig(name=f"{module}:unlucky"))
    with pytest.raises(ConfigError, match=r"environment '.*:unlucky': it cannot be made: KeyError: 'luck' \(.*:\d+\)"):
        make()


def test_two_tools_of_one_name_are_refused_at_once():
    with pytest.raises(ValueError, match=r"different names, not \['calculator', 'calculator'\]"):
        build_env_factory(EnvConfig(name="tools", tools=["calculator", "whet.env.calculator:calculator"]))
