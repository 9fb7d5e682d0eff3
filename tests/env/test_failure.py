"""Failures as data: whose frames a traceback shows, and when there is none."""

from __future__ import annotations

import asyncio
import json
import re
import traceback

import pytest
import torch

from whet.engine.base import EngineFailed, EngineRefused
from whet.env.failure import failure_of, traceback_of
from whet.env.threads import DaemonThreads
from whet.env.tools import Tool


def caught(function, *args):
    try:
        function(*args)
    except BaseException as error:  # handed to what is tested
        return error
    raise AssertionError("it did not raise")


def frames(text):
    return re.findall(r"in (\S+)\n", text)


def users_own(text):
    return json.loads(text)


def pick(tensor):
    return tensor[9]


def wraps(text):
    try:
        return users_own(text)
    except ValueError as error:
        raise KeyError("wrapped") from error


def on_a_thread(function, *args):
    return asyncio.run(DaemonThreads().run(lambda: function(*args), None))


def test_frames_of_whet_and_of_the_standard_library_are_left_out():
    error = caught(on_a_thread, users_own, "{")
    assert {"decode", "_work"} <= set(frames("".join(traceback.format_exception(error)))), "they are there otherwise"
    text = traceback_of(error)
    assert frames(text) == ["caught", "on_a_thread", "<lambda>", "users_own"]
    assert "whet/env/threads.py" not in text and "asyncio/runners.py" not in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.splitlines()[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_what_it_was_raised_from_comes_first():
    text = traceback_of(caught(wraps, "{"))
    assert text.index("JSONDecodeError") < text.index("KeyError: 'wrapped'")
    assert text.count("Traceback") == 2


def test_a_library_that_the_user_called_is_shown():
    text = traceback_of(caught(lambda: torch.nn.Linear(2, 3)(torch.zeros(1, 5))))
    assert "<lambda>" in text and "torch/nn/modules/linear.py" in text


def broken_engine():
    """As the engine raises it: no frame is a user's."""
    code = compile("def step():\n    return tensor[9]\nstep()\n", str(failure_of.__code__.co_filename), "exec")
    exec(code, {"tensor": torch.zeros(2)})


def test_without_a_user_s_frame_everything_is_shown_unless_whet_said_it_in_words():
    assert traceback_of(EngineRefused("too long")) == ""
    assert traceback_of(TimeoutError("the trajectory's 5 s were over")) == ""
    fault = IndexError("of the engine")
    failed = EngineFailed("request a: a step failed")
    failed.__cause__ = fault
    assert "IndexError: of the engine" in traceback_of(failed) and "EngineFailed: request a" in traceback_of(failed)
    error = caught(broken_engine)
    inner = error.with_traceback(error.__traceback__.tb_next.tb_next)  # without the frames of this file
    assert frames(traceback_of(inner)) == ["<module>", "step"]


def test_notes_stand_for_a_traceback_elsewhere():
    error = EngineRefused("no")
    error.add_note("Traceback of another process")
    assert traceback_of(error) == "Traceback of another process\n"


def test_a_failing_tool_says_how_it_was_called():
    def lookup(city: str) -> str:
        """Looks up a city."""
        return {"Rome": 1}[city]

    with pytest.raises(KeyError) as error:
        asyncio.run(Tool(lookup)({"city": "Oslo"}, 5.0))
    failure = failure_of(error.value, "env.step")
    assert (failure.kind, failure.message, failure.where) == ("KeyError", "'Oslo'", "env.step")
    assert failure.traceback.endswith("KeyError: 'Oslo'\nraised by the tool lookup, called with {\"city\": \"Oslo\"}\n")
    assert frames(failure.traceback)[-1] == "lookup"


def test_a_cycle_of_causes_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert "ValueError: a" in traceback_of(first)


def test_what_was_typed_at_a_prompt_is_the_users_and_what_dataclasses_generate_is_not():
    for file in ("<string>", "<stdin>", "<python-input-3>"):
        names: dict[str, object] = {}
        exec(compile("def typed(text): return text.lable", file, "exec"), names)
        told = traceback_of(caught(on_a_thread, names["typed"], "a"))
        assert frames(told)[-1] == "typed" and told.endswith("AttributeError: 'str' object has no attribute 'lable'\n")
    made: dict[str, object] = {}
    exec(compile("def __init__(text): return text.lable", "<string>", "exec"), made)
    assert "__init__" not in frames(traceback_of(caught(on_a_thread, made["__init__"], "a")))
