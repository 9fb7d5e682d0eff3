"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from whet.data.messages import messages_from, tools_from
from whet.data.parsers import OPEN
from whet.serve.answers import Event, PlainEvents, Sampled, usage_of
from whet.serve.bodies import parse_body
from whet.serve.bounds import MAX_MESSAGES, MAX_TOOLS, Count
from whet.serve.calls import Call
from whet.serve.constraints import ToolChoice, native_grammars, reply_grammar, response_grammar
from whet.serve.errors import ApiError
from whet.serve.openai_body import OpenAIBody, params_of, requests_of
from whet.serve.service import Service
from whet.serve.text import TextStream, held_back, token_fields
from whet.types import JSON, Chunk, Finish, Message, ToolCall, text_before

CALL_OPENERS: Mapping[str, str] = {"hermes": OPEN}
"""Text from which on a reply may be a tool call, by parser; a stream holds the reply back from there.
With any other parser everything is held back."""


class ChatBody(OpenAIBody):
    """OpenAI's chat request."""

    messages: list[Any] = Field(max_length=MAX_MESSAGES)
    tools: list[Any] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: dict[str, Any] | None = None


async def prepare_chat(service: Service, value: JSON) -> ChatAnswer:
    """A body as an answer to be filled.

    Raises:
        ApiError: it cannot be answered.
    """
    body = parse_body(ChatBody, value)
    service.check_model(body.model)
    service.check_samples(body.n or 1)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    tools = _tools(body)
    formats = {"response_format": response_grammar(body.response_format)} | native_grammars(body.json_schema, body.regex, body.ebnf)
    grammar = await reply_grammar(service, body.tool_choice, tools, parallel=body.parallel_tool_calls, formats=formats)
    tokens = await service.prompt(_messages(body), tools)
    room = service.room(tokens, "messages")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = params_of(service, body, room if limit is None else limit, body.top_logprobs or 0 if body.logprobs else None, grammar)
    call_id = f"chatcmpl-{uuid.uuid4().hex}"
    call = Call(call_id, tuple(requests_of(service, body, call_id, tokens, sampling)))
    return ChatAnswer(service, body, call, with_tools=bool(tools))


def _messages(body: ChatBody) -> tuple[Message, ...]:
    """Messages of a request. Empty fields that clients add to a message are left out: they send replies
    back as they got them."""
    quiet = ("annotations", "refusal", "audio", "function_call", "tool_calls")
    dicts = [
        {key: item for key, item in message.items() if item or key not in quiet} if isinstance(message, dict) else message
        for message in body.messages
    ]
    try:
        messages = messages_from(dicts, "messages")
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
    # A client writes the arguments of calls in a way of its own, not as the model wrote them: the template writes them alike.
    return tuple(replace(m, tool_calls=tuple(replace(call, text=None) for call in m.tool_calls)) for m in messages)


def _tools(body: ChatBody) -> tuple[Mapping[str, JSON], ...]:
    if body.tool_choice == "none":
        return ()
    try:
        return tools_from(body.tools, "tools")
    except ValueError as error:
        raise ApiError(400, str(error), param="tools") from None


@dataclass(slots=True, eq=False)
class _Choice:
    """One sample as a chat message."""

    sampled: Sampled
    content: str = ""
    """Part of the content that a stream has sent."""
    tool_calls: list[Event] = field(default_factory=list[Event])
    has_begun: bool = False

    @property
    def finish_reason(self) -> str | None:
        return "tool_calls" if self.tool_calls and self.sampled.finish is Finish.STOP else self.sampled.finish


class ChatAnswer(PlainEvents):
    """Fills in chat completions.

    Args:
        service: the service.
        body: body of the request.
        call: its engine requests, one for each choice.
        with_tools: True if replies are read as tool calls.
    """

    def __init__(self, service: Service, body: ChatBody, call: Call, *, with_tools: bool) -> None:
        self.call, self.stream = call, body.stream
        self._service, self._body, self._with_tools = service, body, with_tools
        self._head: Event = {"id": call.id, "created": int(time.time()), "model": service.name}
        decode = service.decoder(keep_special=with_tools or not body.skip_special_tokens)
        self._choices = [_Choice(Sampled(r, TextStream(decode, r.sampling.stop))) for r in call.requests]
        self._opener = CALL_OPENERS.get(service.config.parser)

    def take(self, place: int, chunk: Chunk) -> None:
        self._choices[place].sampled.take(chunk)

    def events(self, place: int) -> list[Event]:
        choice = self._choices[place]
        out: list[Event] = []
        if not choice.has_begun:
            choice.has_begun = True
            out.append(self._event(place, {"role": "assistant", "content": ""}))
        ended = choice.sampled.finish is not None
        text = self._final(choice) if ended else self._certain(choice)
        new, choice.content = text[len(choice.content) :], text
        logprobs = self._logprobs(choice, choice.sampled.num_new)
        if new or logprobs:
            out.append(self._event(place, {"content": new}, logprobs=logprobs))
        if ended:
            for i, call in enumerate(choice.tool_calls):
                out.append(self._event(place, {"tool_calls": [{"index": i, **call}]}))
            out.append(self._event(place, {}, choice.finish_reason))
        return out

    def closing(self) -> list[Event]:
        if not self._body.wants_usage:
            return []
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}]

    def whole(self) -> Event:
        choices: list[Event] = []
        for place, choice in enumerate(self._choices):
            content = self._final(choice)
            message: dict[str, JSON] = {"role": "assistant", "content": content, "refusal": None}
            if choice.tool_calls:
                message |= {"content": content or None, "tool_calls": choice.tool_calls}
            logprobs = self._logprobs(choice, len(choice.sampled.tokens))
            choices.append({"index": place, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def _event(self, place: int, delta: Event, finish: str | None = None, *, logprobs: JSON = None) -> Event:
        choice = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._body.wants_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage}

    def _usage(self) -> Event:
        return usage_of([choice.sampled for choice in self._choices], len(self._choices))

    def _logprobs(self, choice: _Choice, num_last: int) -> Event | None:
        """Log-probs of the last `num_last` tokens, under the model's own distribution."""
        if not self._body.logprobs:
            return None
        decode, sampled = self._service.renderer.decode, choice.sampled
        content: list[Event] = []
        for i in range(len(sampled.tokens) - num_last, len(sampled.tokens)):
            top = [token_fields(decode, *pair) for pair in sampled.top_logprobs[i]]
            content.append({**token_fields(decode, sampled.tokens[i], sampled.raw_logprobs[i]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _certain(self, choice: _Choice) -> str:
        """Part of the content that no later token can change."""
        text = choice.sampled.text.certain
        if not self._with_tools:
            return text
        if not self._opener:
            return ""
        before = text_before(text, (self._opener,))
        return before[: len(before) - held_back(before, self._opener)].strip("\n")

    def _final(self, choice: _Choice) -> str:
        """The content of a choice that has ended; its tool calls are noted. A reply with a malformed call stays the text that it is."""
        text = choice.sampled.text.certain
        if not self._with_tools:
            return text
        parsed = self._service.parse(text)
        if parsed.malformed or not parsed.message.tool_calls:
            return text.strip("\n")
        choice.tool_calls = [_wire_call(call) for call in parsed.message.tool_calls]
        return parsed.message.content


def _wire_call(call: ToolCall) -> Event:
    """A tool call as OpenAI sends it, with an id that no other reply's calls have."""
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
