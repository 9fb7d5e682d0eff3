"""Classes that were written for TRL's `environment_factory`."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, opens, run, says, turns
from whet.data.parsers import Parsed
from whet.env.base import Appraising
from whet.env.build import EnvConfig, build_env_factory
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.types import Message, Outcome, SamplingParams, Task, ToolCall

MODULE = '''
class Counter:
    def __init__(self):
        self.value = 0

    def reset(self, **row):
        self.value = row.get("start", 0)
        self.row = row
        return f"The counter is at {self.value}."

    def add(self, by: int) -> str:
        """Adds to the counter.

        Args:
            by: how much.
        """
        before = self.value
        import time; time.sleep(0.01)  # two calls at a time would lose one
        self.value = before + by
        if by == 13:
            raise ValueError("13 is unlucky")
        return str(self.value)

    async def look(self) -> str:
        """Looks at the counter."""
        return str(self.value)

    def _hidden(self): ...

    def get_reward(self) -> float:
        return self.value / 10

class Silent:
    def reset(self, label):
        self.label = label
'''


@pytest.fixture
def path(tmp_path):
    (tmp_path / "counters.py").write_text(MODULE)
    return str(tmp_path / "counters.py")


def call(*calls):
    return Parsed(Message("assistant", "", tuple(ToolCall(name, arguments, str(i)) for i, (name, arguments) in enumerate(calls))))


def test_methods_are_tools_and_the_end_has_a_reward(path):
    env = build_env_factory(EnvConfig(name="trl", options={"factory": f"{path}:Counter"}))()
    task = Task("t", (Message("user", "Count."),), "5", {"start": 1})

    async def main():
        first = await env.start(task)
        step = await env.step(call(("add", {"by": 2}), ("add", {"by": 3}), ("add", {"by": "x"}), ("add", {"by": 13})))
        look = await env.step(call(("look", {})))
        return first, step, look, await env.step(Parsed(Message("assistant", "Done.")))

    first, step, look, last = run(main())
    assert first.prompt == (Message("user", "Count.\n\nThe counter is at 1."),)
    assert [tool["function"]["name"] for tool in env.tools] == ["add", "look"]
    texts = [message.content for message in step.messages]
    assert texts[:2] == ["3", "6"] and texts[2].startswith("Error: add was called with wrong") and texts[3] == "Error: 13 is unlucky"
    assert look.messages[0].content == "19" and step.reward is None
    assert (last.done, last.reward) == (True, 1.9)


def test_reset_gets_the_columns_that_it_takes_and_get_reward_is_optional(path):
    env = build_env_factory(EnvConfig(name="trl", options={"factory": {"a": f"{path}:Counter", "b": f"{path}:Silent"}}))()
    task = Task("t", (Message("user", "Count."),), "5", {"environment": "b", "start": 1})
    assert run(env.start(task)) == task and env.tools == ()
    step = run(env.step(Parsed(Message("assistant", "x"))))
    assert step.done and step.reward is None
    wrong = build_env_factory(EnvConfig(name="trl", options={"factory": {"a": f"{path}:Counter"}}))()
    with pytest.raises(ValueError, match=r"the row's environment is 'b'; env.options.factory has a"):
        asyncio.run(wrong.start(task))


def test_a_trajectory_that_the_limits_cut_has_its_reward_too(path):
    env = build_env_factory(EnvConfig(name="trl", options={"factory": f"{path}:Counter"}))()
    assert isinstance(env, Appraising)
    called = '<tool_call>\n{"name": "add", "arguments": {"by": 4}}\n</tool_call>'

    async def main():
        engine = FakeEngine(turns(says(called), says(called), says(called)))
        params = SamplingParams(999, stop_token_ids=(STOP,))
        made = TrajectoryRun("t/0", Task("t", (Message("user", "12*3?"),), "36"), engine, RENDERER, params, Limits(2, 4000, 400))
        return await made.to_end(opens(env))

    trajectory = run(main())
    assert trajectory.outcome is Outcome.TRUNCATED, trajectory.error
    assert [turn.reward for turn in trajectory.turns] == [None, 0.8]
