"""The tool environment: every call is answered, in order, and counted for what it was."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.formats.hermes import parse_hermes
from whet.data.formats.plain import parse_none
from whet.env.base import Step
from whet.env.tool_env import ToolEnv, shorten
from whet.env.tools import Tool
from whet.types import Message


def double(x: int) -> int:
    """Double it."""
    if x == 13:
        raise ValueError("13 is unlucky")
    return 2 * x


def echo(text: str, times: int = 1) -> str:
    """Say it."""
    return text * times


def broken(kind: str) -> str:
    """Breaks."""
    raise {"key": KeyError("k"), "os": OSError("disk")}[kind]


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def step(env, text):
    return asyncio.run(env.step(parse_hermes(text)))


@pytest.fixture
def env():
    return ToolEnv([Tool(double), Tool(echo), Tool(broken)], max_calls=4, max_reply_chars=200)


def test_a_turn_without_calls_ends_it(env):
    assert step(env, "The answer is 4.") == Step(done=True)
    assert asyncio.run(env.step(parse_none(call("double", x=1)))) == Step(done=True)


def test_calls_are_answered_in_order_right_or_wrong(env):
    text = "".join([call("double", x=4), "<tool_call>{</tool_call>", call("halve", x=4), call("double", x=13), call("double", y=1)])
    answer = step(env, text)
    assert not answer.done
    contents = [message.content for message in answer.messages]
    assert contents[0] == "8"
    assert contents[1].startswith("Error: the tool call is not valid JSON")
    assert contents[2] == "Error: there is no tool 'halve'; the tools are: double, echo, broken"
    assert contents[3] == "Error: 13 is unlucky"
    assert contents[4].startswith("Error: double was called with wrong arguments")
    assert {message.role for message in answer.messages} == {"tool"}
    assert [m.tool_call_id for m in answer.messages] == [f"call_{i}" for i in range(5)]
    assert answer.counts == {"tool_calls": 4, "tool_calls_malformed": 1, "tool_errors": 3}


def test_a_turn_of_malformed_calls_alone_goes_on(env):
    answer = step(env, "<tool_call>{")
    assert [m.content for m in answer.messages] == ["Error: a <tool_call> is never closed by </tool_call>"]
    assert answer.counts == {"tool_calls": 0, "tool_calls_malformed": 1}


def test_calls_over_the_limit_are_answered_and_not_run():
    ran: list[int] = []

    def note(x: int) -> int:
        """Note it."""
        ran.append(x)
        return x

    answer = step(ToolEnv([Tool(note)], max_calls=2), "".join(call("note", x=n) for n in range(4)))
    assert sorted(ran) == [0, 1]
    assert [m.content[:30] for m in answer.messages] == ["0", "1", *["Error: more than 2 calls in on"] * 2]
    assert answer.counts["tool_errors"] == 2


def test_calls_of_a_turn_run_side_by_side():
    both = threading.Barrier(2)

    def meet() -> str:
        """Waits for the other."""
        both.wait(10)
        return "met"

    answer = step(ToolEnv([Tool(meet)]), call("meet") * 2)
    assert [m.content for m in answer.messages] == ["met", "met"]


def test_other_errors_are_raised_the_first_call_s_first(env):
    with pytest.raises(OSError, match="disk"):
        step(env, call("double", x=1) + call("broken", kind="os") + call("broken", kind="key"))


def test_a_late_tool_is_a_timeout():
    async def late() -> str:
        """Late."""
        await asyncio.sleep(20)
        return ""

    with pytest.raises(TimeoutError, match=r"tool late took longer than 0.01 s"):
        step(ToolEnv([Tool(late)], timeout_s=0.01), call("late"))


def test_a_cancelled_step_leaves_no_call_behind():
    ended: list[str] = []

    async def wait() -> str:
        """Waits."""
        try:
            await asyncio.sleep(20)
        finally:
            ended.append("wait")
        return ""

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ToolEnv([Tool(wait)]).step(parse_hermes(call("wait") * 3))
        assert ended == ["wait"] * 3

    asyncio.run(main())


def test_long_replies_and_long_errors_lose_their_middle(env):
    long, unknown = step(env, call("echo", text="a" * 500 + "b" * 500) + call("x" * 500)).messages
    for message, ends in ((long, ("aaaa", "bbbb")), (unknown, ("Error: there is no tool 'xxx", "double, echo, broken"))):
        assert len(message.content) <= 200
        assert message.content.startswith(ends[0]) and message.content.endswith(ends[1])
        assert "characters left out" in message.content


@given(st.text(max_size=400), st.integers(100, 300))
def test_shortening_keeps_both_ends_and_tells_the_truth(text, limit):
    short = shorten(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
        return
    head, _, rest = short.partition("\n[... ")
    number, _, tail = rest.partition(" characters left out ...]\n")
    if "\n[... " not in text:
        assert text.startswith(head) and text.endswith(tail)
        assert len(head) + int(number) + len(tail) == len(text)


@pytest.mark.parametrize(
    ("tools", "options", "what"),
    [
        ([], {}, r"tools with different names, not \[\]"),
        ([double, double], {}, r"different names, not \['double', 'double'\]"),
        ([double], {"max_calls": 0}, "max_calls of at least 1"),
        ([double], {"max_reply_chars": 9}, "max_reply_chars of at least 100"),
    ],
)
def test_impossible_settings_are_refused(tools, options, what):
    with pytest.raises(ValueError, match=what):
        ToolEnv([Tool(tool) for tool in tools], **options)


def test_a_step_answers_one_way():
    with pytest.raises(ValueError, match="raw text or a rewritten history"):
        Step(messages=(Message("user", "a"),), text="b")
    with pytest.raises(ValueError, match="must answer something"):
        Step()
