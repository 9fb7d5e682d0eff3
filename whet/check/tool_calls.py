"""Checks of tools' schemas, and arguments that fit them: from a row, or made from the schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from whet.data.messages import tools_from
from whet.types import JSON, Task

MAX_DEPTH = 16
"""Maximum depth of made arguments: a schema may refer to itself."""
_PLAIN: dict[str, JSON] = {"string": "x", "integer": 1, "number": 1, "boolean": False, "null": None}


def schema_fault(tool: JSON, what: str) -> str:
    """Fault of a tool's schema; empty: none."""
    try:
        (one,) = tools_from([tool], what)
        json.dumps(one)
    except (ValueError, TypeError) as error:
        return str(error) if str(error).startswith(what) else f"{what}: a tool's schema is no JSON: {error}"
    function: Any = one["function"]
    parameters = function.get("parameters", {})
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else None
    name = f"{what}: the parameters of tool {function['name']!r}"
    if not isinstance(properties, Mapping) or not all(isinstance(each, Mapping | bool) for each in properties.values()):
        return f'{name} are no JSON schema of an object: {{"type": "object", "properties": {{NAME: {{"type": ...}}}}}}'
    if parameters.get("type", "object") != "object":
        return f"{name} are of type {parameters['type']!r}; a call's arguments are an object"
    required = parameters.get("required", [])
    if not isinstance(required, list) or not set(map(str, required)) <= properties.keys():
        return f"{name} require {required!r}, which are not among {list(properties)}"
    return ""


def arguments_for(tool: Mapping[str, JSON], task: Task) -> Mapping[str, JSON]:
    """Arguments of the first call of a tool in a task's prompt, or else made from its schema."""
    function: Any = tool["function"]
    for message in () if isinstance(task.prompt, str) else task.prompt:
        for call in message.tool_calls:
            if call.name == function["name"]:
                return call.arguments
    parameters = function.get("parameters", {})
    return _made({"type": "object", **parameters}, parameters.get("$defs", {}), MAX_DEPTH)


def _made(schema: Any, known: Mapping[str, Any], depth: int) -> Any:
    """Small value that fits a schema: its example or default, or the least of its type."""
    if not isinstance(schema, Mapping) or depth == 0:
        return "x"
    if isinstance(name := schema.get("$ref"), str):
        return _made(known.get(name.rpartition("/")[2]), known, depth - 1)
    for key in ("examples", "enum"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return _made(schema[key][0], known, depth - 1)
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {key: _made(properties.get(key), known, depth - 1) for key in schema.get("required", [])}
    if kind == "array":
        return [_made(schema.get("items", {}), known, depth - 1)] * min(int(schema.get("minItems", 0)), MAX_DEPTH)
    if kind in ("integer", "number") and "minimum" in schema:
        return schema["minimum"]
    return _PLAIN.get(str(kind), "x")
