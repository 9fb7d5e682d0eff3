"""Entries of env.tools: names, references, and factories with options."""

import asyncio
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from whet.config import ConfigError
from whet.data.parsers import Parsed
from whet.env.build import EnvConfig, build_env_factory
from whet.env.tool_sets import build_tools
from whet.env.tools import Tool, ToolResult
from whet.types import Message, ToolCall


class Echo:
    """A tool that is no function."""

    name = "echo"

    def __init__(self):
        function = {"name": "echo", "description": "Echoes.", "parameters": {"type": "object", "properties": {}}}
        self.needs, self.schema = {}, {"type": "function", "function": function}

    def bound(self, opened):
        return self

    async def __call__(self, arguments, timeout_s):
        return ToolResult(str(arguments))


@pytest.fixture
def mine(monkeypatch):
    module = ModuleType("mine")

    def add(a: int) -> int:
        """Adds one."""
        return a + 1

    def counters(names: list, by: int = 1):
        def counter(name):
            def count(a: int) -> int:
                return a + by

            count.__name__, count.__doc__ = name, "Counts."
            return count

        return [Echo(), *(counter(name) for name in names)]

    @dataclass
    class Options:
        names: list
        by: int = 1

        def make(self):
            return counters(self.names, self.by)

    module.add, module.counters, module.number, module.Options = add, counters, 3, Options
    monkeypatch.setitem(sys.modules, "mine", module)


def test_a_factory_may_be_a_class_of_its_options(mine):
    env = build_env_factory(EnvConfig(name="tools", tools=[{"name": "mine:Options", "names": ["one"], "by": 5}]))()
    assert [tool["function"]["name"] for tool in env.tools] == ["echo", "one"]
    with pytest.raises(ConfigError, match="unexpected keyword argument 'of'"):
        build_env_factory(EnvConfig(name="tools", tools=[{"name": "mine:Options", "names": [], "of": 5}]))


def test_a_factory_makes_several_tools_with_its_options(mine):
    entries = ["calculator", "mine:add", {"name": "mine:counters", "names": ["one", "two"], "by": 5}]
    env = build_env_factory(EnvConfig(name="tools", tools=entries))()
    assert [tool["function"]["name"] for tool in env.tools] == ["calculator", "add", "echo", "one", "two"]
    calls = tuple(ToolCall(name, arguments, name) for name, arguments in (("two", {"a": 1}), ("echo", {"x": "y"}), ("add", {"a": 1})))
    step = asyncio.run(env.step(Parsed(Message("assistant", "", calls))))
    assert [message.content for message in step.messages] == ["6", "{'x': 'y'}", "2"]
    assert isinstance(build_tools("calculator")[0], Tool)


@pytest.mark.parametrize(
    "entry, words",
    [
        ("calculater", "there is no tool 'calculater'; choose 'calculator'"),
        ({"names": []}, 'a table of env.tools needs a name: { name = "module:factory", ... }, not'),
        ({"name": "calculator", "limit": 3}, "the tool 'calculator' takes no options, not limit"),
    ],
)
def test_an_entry_that_names_no_tool_is_refused_as_it_is_read(entry, words):
    with pytest.raises(ValueError) as error:
        EnvConfig(name="tools", tools=[entry])
    assert words in str(error.value)


@pytest.mark.parametrize(
    "entry, words",
    [
        ({"name": "mine:counters", "name_": []}, "tool 'mine:counters' cannot be called as f(name_=...)"),
        ({"name": "mine:counters", "names": 3}, "tool 'mine:counters': it cannot be made: TypeError"),
        ("mine:number", "tool 'mine:number' is a int; it must be a typed function, or a factory of such"),
        ("mine:missing", "tool 'mine:missing': mine has no 'missing'"),
    ],
)
def test_a_factory_that_makes_no_tools_is_named_with_its_fault(mine, entry, words):
    with pytest.raises(ConfigError) as error:
        build_env_factory(EnvConfig(name="tools", tools=[entry]))
    assert words in str(error.value)
