"""From Anthropic's messages and tools to whet's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from whet.serve.anthropic_body import (
    BLOCKS,
    MessageBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolBody,
    ToolResultBlock,
    ToolUseBlock,
)
from whet.serve.bodies import Body, parse_part
from whet.serve.bounds import check_blocks
from whet.serve.errors import ApiError
from whet.types import JSON, Message, ToolCall

BETWEEN = "\n\n"
"""Text between two blocks of words that the user or the system wrote."""
MEDIA = ("image", "document", "search_result", "container_upload")
CLEARING = "clear_thinking_"
"""Beginning of the one edit of a context that has a place here: earlier thinking is left out where the chat template leaves it out."""


def messages_of(body: PromptBody) -> tuple[Message, ...]:
    """The conversation. Messages of one role after another are one, as for Anthropic.

    Raises:
        ApiError: 400, naming the place that is wrong or not supported.
    """
    check_blocks(body.messages, "messages")
    check_blocks(body.system if isinstance(body.system, list) else [], "system")
    messages: list[Message] = []
    if body.system is not None and (system := _words(body.system, "system", "system")):
        messages.append(Message("system", system))
    read = [_Read(message, f"messages.{i}") for i, message in enumerate(body.messages)]
    names: dict[str, str] = {}
    for role, group in groupby(read, key=lambda each: each.role):
        blocks = [block for each in group for block in each.blocks]
        if role == "assistant":
            messages.append(_assistant([block for _, block in blocks]))
            names |= {call.id: call.name for call in messages[-1].tool_calls}
        else:
            messages.extend(_asked(role, blocks, names))
    if not body.messages:
        raise ApiError(400, "messages is empty, expected at least one message", param="messages")
    if messages[-1].role == "assistant":
        message = "messages ends with an assistant's message, and this server does not continue one: end with a user's message"
        raise ApiError(400, message, param="messages")
    return tuple(messages)


class _Read:
    """A message as blocks, each with its place.

    Args:
        value: a message as it came.
        where: its place.
    """

    def __init__(self, value: JSON, where: str) -> None:
        message = parse_part(where, MessageBody, value)
        self.role = message.role
        self.blocks = _blocks(message.content, message.role, f"{where}.content")


def tools_of(body: PromptBody) -> tuple[Mapping[str, JSON], ...]:
    """The tools in OpenAI's form.

    Raises:
        ApiError: 400 for a tool that is no function of the client's.
    """
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return ()
    return tuple(_tool(tool, f"tools.{i}") for i, tool in enumerate(body.tools or ()))


def check_context(body: PromptBody) -> None:
    """Refuse edits of the context that would change the conversation.

    Raises:
        ApiError: 400 with the edit's name.
    """
    edits = (body.context_management or {}).get("edits") or []
    kinds = [edit.get("type") if isinstance(edit, dict) else edit for edit in edits] if isinstance(edits, list) else [edits]
    for kind in kinds:
        if not str(kind).startswith(CLEARING):
            what = f"the edit {str(kind)[:100]!r} is not done by this server; send the messages as they are to be read"
            raise ApiError(400, f"context_management: {what}", param="context_management", code="unsupported_parameter")


def _tool(value: JSON, where: str) -> Mapping[str, JSON]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        what = f"a tool of type {str(kind)[:100]!r} is not supported; tools have a name and an input_schema, and their client runs them"
        raise ApiError(400, f"{where}: {what}", param="tools", code="unsupported_parameter")
    tool = parse_part(where, ToolBody, value)
    description = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **description, "parameters": tool.input_schema}}


def _blocks(content: str | list[Any], role: str, where: str) -> list[tuple[str, Body]]:
    """Blocks with their places."""
    if isinstance(content, str):
        return [(where, TextBlock(type="text", text=content))]
    return [(f"{where}.{i}", _block(value, role, f"{where}.{i}")) for i, value in enumerate(content)]


def _block(value: JSON, role: str, where: str) -> Body:
    kind = value.get("type") if isinstance(value, dict) else None
    known = BLOCKS[role]
    if not isinstance(kind, str) or kind not in known:
        what = "is media, which this server does not read" if kind in MEDIA else f"is not one of the {role}'s"
        message = f"{where}: a block of type {str(kind)[:100]!r} {what}; blocks are {', '.join(known)}"
        raise ApiError(400, message, param=where)
    return parse_part(where, known[kind], value)


def _words(content: str | list[Any] | None, role: str, where: str) -> str:
    """The words of text blocks."""
    blocks = [block for _, block in _blocks(content or "", role, where)]
    return BETWEEN.join(block.text for block in blocks if isinstance(block, TextBlock) and block.text)


def _assistant(blocks: Sequence[Body]) -> Message:
    thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return Message(
        "assistant",
        "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        tuple(ToolCall(block.name, block.input, block.id) for block in blocks if isinstance(block, ToolUseBlock)),
        reasoning_content=thinking or None,
    )


def _asked(role: str, blocks: Sequence[tuple[str, Body]], names: Mapping[str, str]) -> list[Message]:
    """Messages of the user or the system, and of tools, in their order."""
    out: list[Message] = []
    for is_text, group in groupby(blocks, key=lambda pair: isinstance(pair[1], TextBlock)):
        if is_text:
            words = BETWEEN.join(block.text for _, block in group if isinstance(block, TextBlock) and block.text)
            out.append(Message(role, words))
        else:
            out.extend(_result(block, where, names) for where, block in group if isinstance(block, ToolResultBlock))
    return out


def _result(block: ToolResultBlock, where: str, names: Mapping[str, str]) -> Message:
    """A tool's answer. An error is marked in words, as whet's own tools mark theirs."""
    if block.tool_use_id not in names:
        message = f"{where}: tool_use_id {block.tool_use_id[:100]!r} names no tool_use of an earlier message"
        raise ApiError(400, message, param=f"{where}.tool_use_id")
    text = _words(block.content, "system", f"{where}.content")
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return Message("tool", text, name=names[block.tool_use_id], tool_call_id=block.tool_use_id)
