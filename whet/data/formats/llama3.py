"""Llama 3: the whole reply is a call, `{"name": ..., "parameters": {...}}`, with `<|python_tag|>` before it or not.

What the family's models write besides: several such objects with `;` between them, `[name(key=value), ...]`, `name.call(key="value")`
behind `<|python_tag|>`, `<function=name>{...}</function>`, and behind `<|python_tag|>` plain code, which is the one argument of the tool
that is named `ipython`, `python` or `code_interpreter`. Without `<|python_tag|>` a reply calls only if there are tools. A turn ends with
`<|eot_id|>`, or with `<|eom_id|>` behind a call.
"""

from __future__ import annotations

import re
from contextlib import suppress

from whet.data.formats.format import Forced, Format
from whet.data.formats.pythonic import is_pythonic_call, read_pythonic_call
from whet.data.formats.reading import (
    THINK,
    THINK_END,
    ReplyParts,
    TooManyCalls,
    as_arguments,
    as_name,
    read_json,
    single_parameter,
    skip_space,
)
from whet.data.parsers import Parsed, ToolSchemas

PYTHON = "<|python_tag|>"
CODE_TOOLS = ("ipython", "python", "code_interpreter")
_FUNCTION = re.compile(r"<function=([^>\n]{1,256})>")
_FUNCTION_END = "</function>"
_LIKE_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:')


def parse_llama3(text: str, tools: ToolSchemas = ()) -> Parsed:
    """The calls of a reply, or its text if it is none."""
    reply = ReplyParts()
    with suppress(TooManyCalls):
        _read(text, tools, reply)
    return reply.parsed()


def _read(text: str, tools: ToolSchemas, reply: ReplyParts) -> None:
    at = _behind_thinking(text)
    tagged = text.find(PYTHON, at)
    begin = skip_space(text, at if tagged < 0 else tagged + len(PYTHON))
    if tagged < 0 and not (tools and _begins_call(text, begin)):
        reply.say(text)
        return
    reply.say(text[: at if tagged < 0 else tagged])
    try:
        _calls(text, begin, tools, reply, tagged=tagged >= 0)
    except ValueError as error:
        reply.fault(str(error))


def _behind_thinking(text: str) -> int:
    """The place behind thinking at the beginning, or the end if that is never closed."""
    if not text.startswith(THINK, skip_space(text, 0)):
        return 0
    end = text.find(THINK_END)
    return len(text) if end < 0 else end + len(THINK_END)


def _begins_call(text: str, at: int) -> bool:
    """True if a call begins at a place, or text that tried to be one."""
    if text.startswith("[", at):
        return is_pythonic_call(text, at + 1)
    return _LIKE_CALL.match(text, at) is not None or _FUNCTION.match(text, at) is not None


def _calls(text: str, at: int, tools: ToolSchemas, reply: ReplyParts, *, tagged: bool) -> None:
    if text.startswith("[", at) and is_pythonic_call(text, at + 1):
        _pythonic(text, at + 1, reply)
    elif text.startswith("{", at):
        _objects(text, at, reply)
    elif (found := _FUNCTION.match(text, at)) is not None:
        _functions(text, found, reply)
    elif tagged and is_pythonic_call(text, at) and ".call(" in text[at : at + 300]:
        name, arguments, _ = read_pythonic_call(text, at)
        reply.call(name.removesuffix(".call"), arguments)
    else:
        name = next((tool["function"]["name"] for tool in tools if tool["function"]["name"] in CODE_TOOLS), None)
        key = None if name is None else single_parameter(tools, name)
        if name is None or key is None:
            form = '{"name": ..., "parameters": {...}}'
            raise ValueError(f"behind {PYTHON} a call is due, {form}; there is no tool that takes plain code")
        reply.call(name, {key: text[at:]})


def _pythonic(text: str, at: int, reply: ReplyParts) -> None:
    while not text.startswith("]", at):
        name, arguments, at = read_pythonic_call(text, at)
        reply.call(name, arguments)
        at = skip_space(text, at)
        if text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif not text.startswith("]", at):
            raise ValueError("the list of calls is never closed by ]")
    if skip_space(text, at + 1) != len(text):
        reply.say(text[at + 1 :])


def _objects(text: str, at: int, reply: ReplyParts) -> None:
    while at < len(text):
        value, at = read_json(text, at)
        if not isinstance(value, dict):
            raise ValueError(f"the tool call must be a JSON object with name and parameters, not {type(value).__name__}")
        name = as_name(value.get("name"))
        reply.call(name, as_arguments(value.get("parameters", value.get("arguments", {})), name))
        at = skip_space(text, at)
        if not text.startswith(";", at):
            reply.say(text[at:])
            return
        at = skip_space(text, at + 1)


def _functions(text: str, found: re.Match[str] | None, reply: ReplyParts) -> None:
    while found is not None:
        name = as_name(found[1].strip())
        value, at = read_json(text, found.end())
        at = skip_space(text, at)
        if not text.startswith(_FUNCTION_END, at):
            raise ValueError(f"a <function={name}> is never closed by {_FUNCTION_END}")
        reply.call(name, as_arguments(value, name))
        at = skip_space(text, at + len(_FUNCTION_END))
        found = _FUNCTION.match(text, at)
        if found is None:
            reply.say(text[at:])


LLAMA3 = Format(
    "llama3",
    parse_llama3,
    openers=None,
    markup=(PYTHON,),
    exact=True,
    stops=("<|eom_id|>", "<|eot_id|>"),
    closing="<|eot_id|>",
    forced=Forced("", lambda name: f'{{"name": {name}, "parameters": ', "}", None),
)
