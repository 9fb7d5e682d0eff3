"""Tools: typed Python functions. The schema comes from annotations and docstring; argument errors go back to the
model."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from whet.env.resources import Resource, resources_of
from whet.env.threads import CallTimeout, DaemonThreads
from whet.types import JSON, TurnNote

THREADS = DaemonThreads()
"""Threads of tools that are given no others."""
_PLACE_IN_MEMORY = re.compile(r" at 0x[0-9a-fA-F]+>")
NOTE_CHARS = 400
"""Characters of a call's arguments shown in the report of a tool that failed."""


class ToolArgumentError(ValueError):
    """The model called a tool wrongly. The text is the answer it gets."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result that says more than text. A tool that has only text for the model returns that.

    Example:
        return ToolResult("12 rows", metrics={"rows": 12}, attachments={"query": query})

    Raises:
        TypeError: a reason that is no text, numbers that are not finite, or attachments that are not JSON. In a tool it is an error of
            the environment, not an answer to the model.
    """

    content: Any = ""
    """Answer to the model: text unchanged, anything else as JSON."""
    stop: str | None = None
    """Short reason to end the trajectory, as completed; then the model does not see the content. None: it goes on."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """As in `TurnNote`."""
    attachments: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    """As in `TurnNote`."""

    def __post_init__(self) -> None:
        if self.stop is not None and (not isinstance(self.stop, str) or not self.stop):
            raise TypeError(f"the reason to stop must be a text, not {self.stop!r}")
        self.note("")

    def note(self, tool: str) -> TurnNote | None:
        """Report of the tool `tool` for the turn's record; None: nothing but text and a reason."""
        return TurnNote(tool, self.metrics, self.attachments) if self.metrics or self.attachments else None


class Tool:
    """A function that a model may call.

    Args:
        function: typed, sync or async; its docstring's first paragraph describes the tool, its `Args:`
            section the parameters. A `ValueError` that it raises goes back to the model as the tool's
            answer, a `TimeoutError` makes the trajectory a timeout, any other exception is an
            environment error. Its result is shown to the model: text unchanged, anything else as JSON
            (or `str` if JSON has no such value). A `ToolResult` says more. A sync function runs on a thread, so it may be called
            several times at once. The model does not see parameters with `per_run` and `per_group` as default.
        threads: threads for sync functions; tools may share them.

    Raises:
        ValueError: the function has no name or docstring, or a parameter that no schema can describe.
    """

    def __init__(self, function: Callable[..., Any], threads: DaemonThreads = THREADS) -> None:
        name = getattr(function, "__name__", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"a tool must be a function with a name, not {function!r}; wrap it in a def")
        self.name: str = name
        self.needs = resources_of(function)
        self._function, self._threads = function, threads
        doc = inspect.getdoc(function)
        if not doc:
            raise ValueError(f"tool {self.name} has no docstring; the model reads it to know what the tool does")
        self.description = " ".join(doc.split("\n\n", 1)[0].split())
        self._fields, self._arguments = _argument_model(self.name, function, _argument_docs(doc))

    def bound(self, opened: Mapping[str, Any]) -> Tool:
        """The tool with its open resources, by parameter."""
        tool = copy.copy(self)
        tool._function = partial(self._function, **opened)
        return tool

    @property
    def schema(self) -> dict[str, JSON]:
        """The tool in OpenAI's function-calling format."""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        for prop in parameters.get("properties", {}).values():
            prop.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def __call__(self, arguments: Mapping[str, JSON], timeout_s: float | None) -> ToolResult:
        """Run it: its result, with text as the content.

        Args:
            arguments: as the model wrote them.
            timeout_s: seconds it may take; None: any time.

        Raises:
            ToolArgumentError: the arguments do not fit, or the function refused them with a ValueError.
            TimeoutError: it took longer than `timeout_s`.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolArgumentError(_explain(self.name, error)) from error
        values = {name: getattr(checked, field) for name, field in self._fields.items()}
        try:
            return await self._call(values, timeout_s)
        except CallTimeout as late:
            raise TimeoutError(f"tool {self.name} took longer than {timeout_s} s (env.tool_timeout_s)") from late
        except ValueError as error:
            raise ToolArgumentError(str(error) or type(error).__name__) from error
        except Exception as error:  # passed on as it is, with what led to it
            error.add_note(f"raised by the tool {self.name}, called with {_text(dict(arguments))[:NOTE_CHARS]}")
            raise

    async def _call(self, values: Mapping[str, Any], timeout_s: float | None) -> ToolResult:
        if not inspect.iscoroutinefunction(self._function):
            return await self._threads.run(lambda: _result(self._function(**values)), timeout_s)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return _result(await self._function(**values))
        except TimeoutError as error:
            if limit.expired():
                raise CallTimeout(f"longer than {timeout_s} s") from error
            raise


def _result(returned: object) -> ToolResult:
    if isinstance(returned, ToolResult):
        return replace(returned, content=_text(returned.content))
    return ToolResult(_text(returned))


def _text(result: object) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_as_text)


def _as_text(value: object) -> str:
    """Text for a value that JSON does not have. A memory address is refused: it differs in every run."""
    text = str(value)
    if _PLACE_IN_MEMORY.search(text):
        raise TypeError(f"it returned {text}, which says nothing to a model; return text, or numbers, lists and dicts of such")
    return text


def _argument_model(
    tool: str, function: Callable[..., Any], docs: Mapping[str, str]
) -> tuple[dict[str, str], type[BaseModel]]:
    """The arguments as a pydantic model, and the model's field for each parameter.

    Fields are numbered and parameters are their aliases: pydantic keeps some names to itself (`_x`, `model_x`, `json`).
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"tool {tool}: {error}; import the annotation's type where the tool is defined") from error
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {tool}: parameter {parameter} cannot be given by name; use neither / nor *")
        if isinstance(parameter.default, Resource):
            continue
        if name not in hints:
            raise ValueError(f"tool {tool}: parameter {name} has no type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        names[name] = f"parameter_{len(names)}"
        fields[names[name]] = (hints[name], Field(default, alias=name, description=docs.get(name)))
    try:
        model = create_model(tool, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except PydanticUserError as error:
        raise ValueError(f"tool {tool}: a parameter's type has no JSON schema: {error.message}") from error
    return names, model


def _argument_docs(doc: str) -> dict[str, str]:
    """The `Args:` section of a Google-style docstring."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", doc, re.MULTILINE)
    if section is None:
        return {}
    entries = re.findall(r"^ +(\w+)(?: *\([^)]*\))?: *(.*(?:\n {6,}.*)*)", section.group(1), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _explain(tool: str, error: ValidationError) -> str:
    parts = [f"{'.'.join(str(x) for x in e['loc']) or 'arguments'}: {e['msg']}" for e in error.errors()]
    return f"{tool} was called with wrong arguments: " + "; ".join(parts)
