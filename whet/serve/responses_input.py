"""From the items and tools of OpenAI's responses to whet's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from whet.data.strict_json import parse_json
from whet.serve.bodies import parse_part
from whet.serve.bounds import check_blocks
from whet.serve.constraints import ToolChoice, response_grammar
from whet.serve.errors import ApiError
from whet.serve.responses_body import (
    ITEMS,
    PARTS,
    AnyItem,
    CallItem,
    FunctionTool,
    MessageItem,
    OutputItem,
    ReasoningItem,
    RefusalPart,
    ResponsesBody,
    TextFormat,
    TextPart,
    ThoughtPart,
)
from whet.types import JSON, Grammar, Message, ToolCall

BETWEEN = "\n\n"
"""Text between two messages of the system that become one."""
KEPT = "this server keeps no responses: send the earlier items in input, and set store to false"
LOGPROBS = "message.output_text.logprobs"
INCLUDED = ("reasoning.encrypted_content", LOGPROBS)
"""Names in `include`. The first one changes nothing: thinking is sent as it is."""


def messages_of(body: ResponsesBody) -> tuple[Message, ...]:
    """The conversation. What an assistant's items say one after the other is one message, and so is what the system's say.

    Raises:
        ApiError: 400, naming the place that is wrong or not supported.
    """
    messages = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return (*messages, Message("user", body.input))
    check_blocks(body.input, "input")
    items = [(_item(value, f"input.{i}"), f"input.{i}") for i, value in enumerate(body.input)]
    names: dict[str, str] = {}
    for by_model, group in groupby(items, key=lambda pair: _by_model(pair[0])):
        some = list(group)
        if by_model:
            messages.append(_assistant(some))
            names |= {call.id: call.name for call in messages[-1].tool_calls}
        else:
            messages.extend(_asked(item, where, names) for item, where in some)
    if not items:
        raise ApiError(400, "input is empty, expected text or at least one item", param="input")
    if messages[-1].role == "assistant":
        message = "input ends with what the assistant said, and this server does not continue it: end with another item"
        raise ApiError(400, message, param="input")
    return _joined(messages)


def tools_of(body: ResponsesBody) -> tuple[Mapping[str, JSON], ...]:
    """The tools in the form of OpenAI's chat.

    Raises:
        ApiError: 400 for a tool that is no function of the client's.
    """
    tools = tuple(_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ()))
    return () if body.tool_choice == "none" else tools


def choice_of(body: ResponsesBody) -> ToolChoice:
    """`tool_choice` in the form of OpenAI's chat.

    Raises:
        ApiError: 400 for a choice that is not supported.
    """
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        message = 'tool_choice must be auto, none, required, or {"type": "function", "name": ...}'
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    return {"type": "function", "function": {"name": choice["name"]}}


def format_of(body: ResponsesBody) -> Grammar | None:
    """Grammar for `text.format`; None: any text."""
    if body.text is None or body.text.format is None:
        return None
    wanted = parse_part("text.format", TextFormat, body.text.format)
    if wanted.type != "json_schema":
        return response_grammar({"type": wanted.type})
    if wanted.body is None:
        raise ApiError(400, "text.format: json_schema needs a schema", param="text.format.schema")
    return Grammar("json_schema", json.dumps(wanted.body))


def check_stateless(body: ResponsesBody) -> None:
    """Refuse what needs a server that keeps responses, and what only OpenAI's has.

    Raises:
        ApiError: 400 with the field's name.
    """
    if body.previous_response_id is not None:
        raise ApiError(400, f"previous_response_id: {KEPT}", param="previous_response_id", code="unsupported_parameter")
    if body.store:
        raise ApiError(400, f"store: {KEPT}", param="store", code="unsupported_parameter")
    for name in body.include or ():
        if name not in INCLUDED:
            raise ApiError(400, f"include: {name[:100]!r} is not sent by this server", param="include", code="unsupported_parameter")


def alternatives_of(body: ResponsesBody) -> int | None:
    """Number of alternatives to report for each token; None: no log-probs are wanted.

    Raises:
        ApiError: 400, alternatives of log-probs that are not wanted.
    """
    if LOGPROBS in (body.include or ()):
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(400, f"top_logprobs needs {LOGPROBS} in include", param="top_logprobs")
    return None


def _tool(value: JSON, where: str) -> Mapping[str, JSON]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "function":
        message = f"{where}: a tool of type {str(kind)[:100]!r} is not supported; only functions are, which their client runs"
        raise ApiError(400, message, param="tools", code="unsupported_parameter")
    tool = parse_part(where, FunctionTool, value)
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.parameters or {}}}


def _item(value: JSON, where: str) -> AnyItem:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in ITEMS:
        what = f"an item of type {str(kind)[:100]!r} is not supported; items are {', '.join(ITEMS)}"
        raise ApiError(400, f"{where}: {KEPT if kind == 'item_reference' else what}", param=where, code="unsupported_parameter")
    return parse_part(where, ITEMS[kind], value)


def _by_model(item: AnyItem) -> bool:
    return isinstance(item, CallItem | ReasoningItem) or (isinstance(item, MessageItem) and item.role == "assistant")


def _assistant(items: Sequence[tuple[AnyItem, str]]) -> Message:
    thoughts = [_thinking(item, where) for item, where in items if isinstance(item, ReasoningItem)]
    words = [_words(item.content, f"{where}.content") for item, where in items if isinstance(item, MessageItem)]
    calls = tuple(_call(item, where) for item, where in items if isinstance(item, CallItem))
    return Message("assistant", "".join(words), calls, reasoning_content="\n".join(filter(None, thoughts)) or None)


def _asked(item: AnyItem, where: str, names: Mapping[str, str]) -> Message:
    """A message of the user, the system or a tool."""
    if isinstance(item, MessageItem):
        return Message("system" if item.role == "developer" else item.role, _words(item.content, f"{where}.content"))
    output = cast(OutputItem, item)
    if output.call_id not in names:
        message = f"{where}: call_id {output.call_id[:100]!r} names no function_call of an earlier item"
        raise ApiError(400, message, param=f"{where}.call_id")
    return Message("tool", _words(output.output, f"{where}.output"), name=names[output.call_id], tool_call_id=output.call_id)


def _call(item: CallItem, where: str) -> ToolCall:
    try:
        arguments = parse_json(item.arguments or "{}")
    except ValueError as error:
        raise ApiError(400, f"{where}: arguments are not valid JSON: {error}", param=f"{where}.arguments") from None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where}: arguments are a JSON {type(arguments).__name__}, expected an object", param=f"{where}.arguments")
    return ToolCall(item.name, arguments, item.call_id)


def _thinking(item: ReasoningItem, where: str) -> str:
    if text := _words(item.content or item.summary, f"{where}.content"):
        return text
    if item.encrypted_content:
        raise ApiError(400, f"{where}: encrypted thinking is not readable here; leave the item out", param=f"{where}.encrypted_content")
    return ""


def _words(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(value, f"{where}.{i}") for i, value in enumerate(content))


def _part(value: JSON, where: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in PARTS:
        message = f"{where}: a part of type {str(kind)[:100]!r} is not supported: this server reads text alone"
        raise ApiError(400, message, param=where)
    part = parse_part(where, PARTS[kind], value)
    return part.refusal if isinstance(part, RefusalPart) else cast(TextPart | ThoughtPart, part).text


def _joined(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with those of the system that follow each other as one."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role == "system":
            out[-1] = Message("system", f"{out[-1].content}{BETWEEN}{message.content}")
        else:
            out.append(message)
    return tuple(out)
