"""Grammars for the forms of replies that clients ask for: JSON, JSON of a schema, a regular expression,
calls of their tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from whet.data.encoder import spelled
from whet.data.formats.reading import THINK_END
from whet.data.formats.table import FORMATS
from whet.data.parsers import ToolSchemas
from whet.serve.bodies import Body, parse_part
from whet.serve.errors import ApiError
from whet.serve.service import Service
from whet.types import JSON, Grammar

ANY_OBJECT = '{"type": "object"}'


class JSONSchema(Body):
    """OpenAI's `response_format.json_schema`."""

    name: str = ""
    description: str | None = None
    body: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """A reply always keeps to the schema, strict or not."""


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class NamedTool(Body):
    """OpenAI's `tool_choice` of one tool."""

    type: Literal["function"]
    function: dict[str, Any]


ToolChoice = Literal["auto", "none", "required"] | dict[str, Any] | None


async def one_grammar(service: Service, wanted: Mapping[str, Grammar | None]) -> Grammar | None:
    """The one grammar that a request asks for, by the field that does.

    Raises:
        ApiError: there are two, or the grammar cannot be used.
    """
    asked = [(param, grammar) for param, grammar in wanted.items() if grammar is not None]
    if len(asked) > 1:
        raise ApiError(400, f"{asked[0][0]} and {asked[1][0]} cannot both say what the reply is: leave one out", param=asked[1][0])
    for param, grammar in asked:
        await service.check_grammar(grammar, param)
        return grammar
    return None


async def reply_grammar(
    service: Service, choice: ToolChoice, tools: ToolSchemas, *, parallel: bool | None, formats: Mapping[str, Grammar | None], opened: bool
) -> Grammar | None:
    """The grammar of a reply, of calls or of a form; None: any text.

    Args:
        service: the service.
        choice: OpenAI's `tool_choice`.
        tools: tools of the prompt.
        parallel: False: one call at most.
        formats: the forms that the request asks for, by the field that does.
        opened: the prompt ends within thinking.

    Raises:
        ApiError: there is no such grammar, or more than one is asked for.
    """
    if tools and (fault := service.renderer.chosen.fault):
        raise ApiError(400, f"tools: {fault}".replace("env.parser", "parser"), param="tools", code="unsupported_parameter")
    calls = await call_grammar(service, choice, tools, parallel=parallel is not False, opened=opened)
    if parallel is False and tools and calls is None:
        message = "parallel_tool_calls can be false where tool_choice is required or names a tool: a free reply calls as many as it likes"
        raise ApiError(400, message, param="parallel_tool_calls", code="unsupported_parameter")
    grammar = await one_grammar(service, {"tool_choice": calls, **formats})
    if grammar is not None and calls is None and tools:
        message = "a reply that has to be of a form cannot call tools: set tool_choice to none, or ask for no form"
        raise ApiError(400, message, param="tools")
    return grammar


def response_grammar(value: JSON) -> Grammar | None:
    """Grammar for `response_format`; None: any text."""
    if value is None:
        return None
    wanted = parse_part("response_format", ResponseFormat, value)
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_schema", ANY_OBJECT)
    return Grammar("json_schema", json.dumps(parse_part("response_format.json_schema", JSONSchema, wanted.json_schema).body))


def native_grammars(json_schema: str | None, regex: str | None, ebnf: str | None) -> dict[str, Grammar | None]:
    """SGLang's fields."""
    return {
        "json_schema": None if json_schema is None else Grammar("json_schema", json_schema),
        "regex": None if regex is None else Grammar("regex", regex),
        "ebnf": None if ebnf is None else Grammar("ebnf", ebnf),
    }


async def call_grammar(service: Service, choice: ToolChoice, tools: ToolSchemas, *, parallel: bool, opened: bool) -> Grammar | None:
    """Grammar for `tool_choice`: nothing but calls of the tools, or exactly one call of the tool that
    it names.

    Args:
        opened: the prompt ends within thinking, which the reply closes first.

    Raises:
        ApiError: the tool does not exist, its parameters are no schema, or the format of the model's
            calls is none that a grammar can force.
    """
    if choice in (None, "auto", "none"):
        return None
    form = service.renderer.format
    if (forced := form.forced) is None:
        able = ", ".join(name for name, each in FORMATS.items() if each.forced is not None)
        message = f"tool_choice: no call can be forced in this server's format {form.name}, since {form.why_not_forced}; it can in {able}"
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    if isinstance(choice, dict):
        name = parse_part("tool_choice", NamedTool, choice).function.get("name")
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ApiError(400, f"tool_choice names the tool {name!r}, which is not among tools", param="tool_choice")
    if not tools:
        raise ApiError(400, f"tool_choice is {choice!r}, but there are no tools", param="tool_choice")
    rules: list[str] = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = await _parameters(service, function)
        name = function["name"] if forced.bare else json.dumps(function["name"], ensure_ascii=False)
        head, tail = _literal(service, forced.open(name)), _literal(service, forced.close)
        rules += [f"call_{i}: {head} arguments_{i} {tail}", f"arguments_{i}: %json {schema}"]
    several = parallel and not isinstance(choice, dict) and forced.between is not None
    more = f"({_literal(service, forced.between or '')} call)*" if several else ""
    some = " | ".join(f"call_{i}" for i in range(len(tools)))
    before = _literal(service, (f"{THINK_END}\n\n" if opened else "") + forced.before)
    return Grammar("lark", "\n".join([f"start: {before} call {more} {_literal(service, forced.after)}", f"call: {some}", *rules, ""]))


def _literal(service: Service, text: str) -> str:
    """A text in a grammar. What the tokenizer has a token for is named by it: its letters are other tokens."""
    renderer = service.renderer
    out: list[str] = []
    at = 0
    for match in spelled((*renderer.format.markup, THINK_END)).finditer(text):
        tokens = renderer.encode(match[0])
        if len(tokens) == 1:
            out += [_quoted(text[at : match.start()]), f"<[{tokens[0]}]>"]
            at = match.end()
    return " ".join(part for part in (*out, _quoted(text[at:])) if part != '""')


async def _parameters(service: Service, function: Mapping[str, JSON]) -> str:
    """A tool's arguments as a schema of an object."""
    param = f"tools: the parameters of {function['name']}"
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise ApiError(400, f"{param} must be the JSON schema of an object", param="tools")
    schema = {**schema, "type": "object"}
    await service.check_grammar(Grammar("json_schema", json.dumps(schema)), "tools", param)
    return json.dumps(schema)


def _quoted(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text, ensure_ascii=False)
