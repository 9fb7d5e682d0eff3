"""Bodies of Anthropic's two routes, with their blocks, tools and choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from whet.serve.bodies import Body
from whet.serve.bounds import MAX_MESSAGES, MAX_TOOLS, Count, Name, Positive, Seed, Stops
from whet.serve.sampling import SamplingBody


class TextBlock(Body):
    """Words."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(Body):
    """Thinking of an earlier reply. Its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: dict[str, Any] | None = None


class ToolUseBlock(Body):
    """A tool call of an earlier reply."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Body):
    """A tool's answer."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[Any] | None = None
    is_error: bool = False
    toolset_name: None = None
    cache_control: dict[str, Any] | None = None


BLOCKS: Mapping[str, Mapping[str, type[Body]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
"""Blocks by the role that they may come from, and their type."""


class MessageBody(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class ToolBody(Body):
    """A tool. Clients ask with some of its fields for what their own server does; those change nothing."""

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """Accepted without effect: a free reply's calls are as the model writes them."""
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


class ChoiceBody(Body):
    """The tools that the reply may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """A wish to have the model think. How long it thinks is up to the model, and its thinking is always sent whole."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """A reply as JSON of a schema."""

    type: Literal["json_schema"]
    body: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Form of the reply; its effort changes nothing."""

    effort: Name | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """Fields that make the prompt."""

    model: Name | None = None
    messages: list[Any] = Field(max_length=MAX_MESSAGES)
    system: str | list[Any] | None = None
    tools: list[Any] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: Literal["standard"] | None = None


class MessagesBody(PromptBody, SamplingBody):
    """Anthropic's request, with the extensions of the other routes. Fields that say who asks, or how it is billed, change nothing."""

    max_tokens: Positive
    stream: bool = False
    stop: Stops | None = Field(default=None, alias="stop_sequences")
    seed: Seed | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Name | None = None
    inference_geo: Name | None = None
