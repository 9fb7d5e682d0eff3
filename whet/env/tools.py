"""Tools: typed Python functions. The schema comes from annotations and docstring; argument errors go back to the model."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from whet.types import JSON


class ToolArgumentError(ValueError):
    """The model called a tool wrongly. The text is the answer it gets."""


class Tool:
    """A function that a model may call.

    Args:
        function: typed, sync or async; its docstring's first paragraph describes the tool, its `Args:` section the parameters.
            A `ValueError` that it raises goes back to the model as the tool's answer; any other exception is an environment error.

    Raises:
        ValueError: if a parameter has no annotation, or the function has no docstring.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name: str = function.__name__
        self._function = function
        doc = inspect.getdoc(function)
        if not doc:
            raise ValueError(f"tool {self.name} has no docstring; the model reads it to know what the tool does")
        self.description = doc.split("\n\n", 1)[0].replace("\n", " ").strip()
        self._arguments = _argument_model(function, _argument_docs(doc))

    @property
    def schema(self) -> dict[str, JSON]:
        """The tool in OpenAI's function-calling format."""
        parameters = self._arguments.model_json_schema()
        parameters.pop("title", None)
        for prop in parameters.get("properties", {}).values():
            prop.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def __call__(self, arguments: Mapping[str, JSON], timeout_s: float) -> str:
        """Run it; sync functions run on a thread.

        Raises:
            ToolArgumentError: the arguments do not fit, or the function refused them with a ValueError.
            TimeoutError: it took longer than `timeout_s`.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolArgumentError(_explain(self.name, error)) from error
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        try:
            async with asyncio.timeout(timeout_s):
                if inspect.iscoroutinefunction(self._function):
                    result = await self._function(**values)
                else:
                    result = await asyncio.to_thread(self._function, **values)
        except TimeoutError as error:
            raise TimeoutError(f"tool {self.name} took longer than {timeout_s:g} s") from error
        except ValueError as error:
            raise ToolArgumentError(str(error)) from error
        return str(result)


def _argument_model(function: Callable[..., Any], docs: Mapping[str, str]) -> type[BaseModel]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {function.__name__}: parameter *{name} cannot be described in a schema; name each parameter")
        if name not in hints:
            raise ValueError(f"tool {function.__name__}: parameter {name} has no type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints[name], Field(default, description=docs.get(name)))
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


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
