"""The body of OpenAI's responses, with its items, tools and forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from whet.serve.bodies import Body
from whet.serve.bounds import MAX_MESSAGES, MAX_TOOLS, Count, Name, Positive, Seed
from whet.serve.openai_body import StreamOptions
from whet.serve.sampling import SamplingBody


class TextPart(Body):
    """Words of a message or of a tool's answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Body):
    """Words with which another model refused."""

    type: Literal["refusal"]
    refusal: str


class ThoughtPart(Body):
    """A part of thinking, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class AnyItem(Body):
    """Fields of all items that change nothing."""

    id: Name | None = None
    status: Name | None = None


class MessageItem(AnyItem):
    """One message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    phase: Name | None = None


class CallItem(AnyItem):
    """A tool call of an earlier reply."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: None = None
    caller: dict[str, Any] | None = None


class OutputItem(AnyItem):
    """A tool's answer."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | list[Any]
    name: Name | None = None
    namespace: None = None
    caller: dict[str, Any] | None = None


class ReasoningItem(AnyItem):
    """Thinking of an earlier reply."""

    type: Literal["reasoning"]
    summary: list[Any] = Field(default_factory=list[Any])
    content: list[Any] | None = None
    encrypted_content: str | None = None


ITEMS: Mapping[str, type[AnyItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
"""Items by their type."""
PARTS: Mapping[str, type[Body]] = {
    **dict.fromkeys(("input_text", "output_text", "text"), TextPart),
    "refusal": RefusalPart,
    **dict.fromkeys(("reasoning_text", "summary_text"), ThoughtPart),
}
"""Parts of items by their type."""


class FunctionTool(Body):
    """A tool."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted without effect: a free reply's calls are as the model writes them."""


class TextFormat(Body):
    """Form of the reply."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    body: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """Form of the reply; its verbosity changes nothing."""

    format: dict[str, Any] | None = None
    verbosity: Name | None = None


class Reasoning(Body):
    """Effort `none` switches thinking off and any other switches it on, where the chat template has a variable for that."""

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class ResponsesBody(SamplingBody):
    """OpenAI's request, with the extensions of the other routes. Fields that say who asks, or how it is billed, change nothing."""

    model: Name | None = None
    input: str | Annotated[list[Any], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    tools: list[Any] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Positive | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    store: bool | None = None
    previous_response_id: Name | None = None
    include: Annotated[list[Name], Field(max_length=16)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    max_tool_calls: Count | None = None
    """Accepted without effect: it counts the calls of tools that a server runs."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
