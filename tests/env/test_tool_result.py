"""A tool's result that says more than text: it ends the trajectory, and its numbers and data reach metrics, records and rewards."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from whet.data.formats.hermes import parse_hermes
from whet.env.base import Step
from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool, ToolResult
from whet.types import TurnNote


def measure(number: int) -> ToolResult:
    """Measures."""
    return ToolResult({"seen": number}, metrics={"number": number}, attachments={"call": number})


def hand_in(text: str) -> ToolResult:
    """Hands in."""
    return ToolResult("Thanks.", stop=text)


def plain() -> str:
    """Text."""
    return "text"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(text) -> Step:
    return asyncio.run(ToolEnv([Tool(measure), Tool(hand_in), Tool(plain)]).step(parse_hermes(text)))


def test_a_step_has_what_its_calls_reported_in_their_order():
    answer = step(call("measure", number=2) + call("plain") + call("measure", number=3))
    assert [message.content for message in answer.messages] == ['{"seen": 2}', "text", '{"seen": 3}']
    assert answer.notes == (TurnNote("measure", {"number": 2}, {"call": 2}), TurnNote("measure", {"number": 3}, {"call": 3}))
    assert (answer.done, answer.stop) == (False, None)


def test_the_first_reason_to_stop_is_that_of_the_step_and_all_calls_are_run():
    answer = step(call("hand_in", text="one") + call("hand_in", text="two") + call("measure", number=1))
    assert (answer.done, answer.stop) == (True, "one")
    assert [note.tool for note in answer.notes] == ["measure"] and answer.counts["tool_calls"] == 3


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"stop": ""}, "the reason to stop must be a text, not ''"),
        ({"stop": True}, "the reason to stop must be a text, not True"),
        ({"metrics": {"x": float("nan")}}, "finite numbers by name, not 'x': nan"),
        ({"metrics": {"x": "1"}}, "finite numbers by name, not 'x': '1'"),
        ({"metrics": {"x": True}}, "finite numbers by name, not 'x': True"),
        ({"attachments": {"x": {1, 2}}}, "attachments must be JSON: Object of type set"),
        ({"attachments": {"x": float("inf")}}, "attachments must be JSON"),
    ],
)
def test_a_result_of_another_form_is_an_error_of_the_tool_and_no_answer(given, what):
    def wrong() -> ToolResult:
        """Wrong."""
        return ToolResult("", **given)

    with pytest.raises(TypeError, match=what) as error:
        asyncio.run(Tool(wrong)({}, None))
    assert "raised by the tool wrong" in error.value.__notes__[0]


def test_a_reason_belongs_to_an_end():
    with pytest.raises(ValueError, match="gives the reason 'r' for an end, and is not done"):
        replace(Step(done=True, stop="r"), done=False, text="t")
