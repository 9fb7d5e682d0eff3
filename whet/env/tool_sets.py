"""From the entries of `env.tools` to tools: functions, and factories that make several tools with options of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

from whet.config import ConfigError, call_factory, resolve, resolve_callable
from whet.env.calculator import calculator
from whet.env.resources import Resource
from whet.env.threads import DaemonThreads
from whet.env.tools import THREADS, Tool, ToolResult
from whet.types import JSON

ToolEntry = str | dict[str, Any]
"""A tool's name or reference; or a table with the `name` of a factory and its keyword arguments."""


@runtime_checkable
class AnyTool(Protocol):
    """Something that a model may call. `Tool` makes one of a function."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Mapping[str, Resource]:
        """Resources that its calls use."""
        ...

    @property
    def schema(self) -> Mapping[str, JSON]:
        """The tool in OpenAI's function-calling format."""
        ...

    def bound(self, opened: Mapping[str, Any]) -> AnyTool:
        """The tool with its open resources, by the names in `needs`."""
        ...

    async def __call__(self, arguments: Mapping[str, JSON], timeout_s: float | None) -> ToolResult:
        """Run it: its result, with text as the content.

        Args:
            arguments: as the model wrote them.
            timeout_s: seconds it may take; None: any time.

        Raises:
            ToolArgumentError: the model called it wrongly. The text is the answer it gets.
            TimeoutError: it took longer than `timeout_s`.
            Exception: any other is an error of the environment.
        """
        ...


@runtime_checkable
class ToolMaker(Protocol):
    """The options of a factory, as a record."""

    def make(self) -> Sequence[AnyTool]:
        """Make the tools."""
        ...


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"calculator": calculator}
"""Built-in tools that are one function."""

FACTORIES: Mapping[str, str] = {
    "browse": "whet.env.browse.tool:browse",
    "mcp": "whet.env.mcp.tools:McpTools",
    "search": "whet.env.search.tool:search",
    **{name: f"whet.env.sandbox.tools:{name}" for name in ("python", "shell", "files")},
}
"""Built-in factories of tools, by reference: each returns a function, an `AnyTool`, or several of them. Its parameters are its options."""


def name_of(entry: ToolEntry) -> str:
    """Name or reference of an entry.

    Raises:
        ValueError: a table without a name, or one that is neither built in nor a reference.
    """
    name = entry if isinstance(entry, str) else entry.get("name")
    if not isinstance(name, str):
        raise ValueError(f'a table of env.tools needs a name: {{ name = "module:factory", ... }}, not {entry!r}')
    if ":" not in name and name not in FUNCTIONS and name not in FACTORIES:
        raise ValueError(f"there is no tool {name!r}; choose {choices()}")
    if not isinstance(entry, str) and name in FUNCTIONS and len(entry) > 1:
        raise ValueError(f"the tool {name!r} takes no options, not {', '.join(key for key in entry if key != 'name')}")
    return name


def choices() -> str:
    """The possible names of tools, for people."""
    return ", ".join(repr(known) for known in (*FUNCTIONS, *FACTORIES)) + ' or an import reference "module:name"'


def build_tools(entry: ToolEntry, threads: DaemonThreads = THREADS, given: Mapping[str, Any] | None = None) -> list[AnyTool]:
    """The tools of an entry: those that a factory makes, or the function that is named.

    Args:
        entry: its name, or a table.
        threads: threads for functions that are not async.
        given: what a built-in factory gets in addition to its options where it has a parameter of the name, such as `sandboxes`.

    Raises:
        ValueError: nothing has this name, it does not take the options, or it cannot be a tool.
    """
    name = name_of(entry)
    if name in FUNCTIONS:
        return [Tool(FUNCTIONS[name], threads)]
    if isinstance(entry, str) and name not in FACTORIES:
        return _tools_of(resolve(name, kind="tool"), name, threads)
    options = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "name"}
    if name in FACTORIES:
        takes = inspect.signature(resolve(FACTORIES[name], kind="tool")).parameters
        options = {**options, **{key: value for key, value in (given or {}).items() if key in takes}}
    factory = resolve_callable(FACTORIES.get(name, name), kind="tool", options=options)
    made = call_factory(factory, name, kind="tool", **options)
    return _tools_of(call_factory(made.make, name, kind="tool") if isinstance(made, ToolMaker) else made, name, threads)


def _tools_of(found: object, name: str, threads: DaemonThreads) -> list[AnyTool]:
    if isinstance(found, list | tuple):
        return [tool for each in cast(Sequence[object], found) for tool in _tools_of(each, name, threads)]
    if isinstance(found, AnyTool) and not isinstance(found, type):
        return [found]
    if not callable(found):
        raise ConfigError([f"tool {name!r} is a {type(found).__name__}; it must be a typed function, or a factory of such"])
    return [Tool(found, threads)]
