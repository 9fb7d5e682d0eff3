"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import Field

from whet.data.messages import messages_from, tools_from
from whet.data.parsers import ToolSchemas
from whet.data.replies import TAIL
from whet.serve.answers import Event, PlainEvents, Sampled, usage_of
from whet.serve.bodies import parse_body
from whet.serve.bounds import MAX_MESSAGES, MAX_TOOLS, Count
from whet.serve.calls import Call
from whet.serve.constraints import ToolChoice, native_grammars, reply_grammar, response_grammar
from whet.serve.errors import ApiError
from whet.serve.openai_body import OpenAIBody, params_of, requests_of
from whet.serve.service import Service
from whet.serve.text import TextStream
from whet.types import JSON, Chunk, Finish, Message, ToolCall


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
    asked = partial(reply_grammar, service, body.tool_choice, tools, parallel=body.parallel_tool_calls, formats=formats)
    grammar = await asked(opened=False)
    tokens = await service.prompt(_messages(body), tools)
    if grammar is not None and service.renderer.replies.opens_thinking(tokens):
        grammar = await asked(opened=True)
    room = service.room(tokens, "messages")
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = params_of(service, body, room if limit is None else limit, body.top_logprobs or 0 if body.logprobs else None, grammar)
    call_id = f"chatcmpl-{uuid.uuid4().hex}"
    call = Call(call_id, tuple(requests_of(service, body, call_id, tokens, sampling)))
    return ChatAnswer(service, body, call, tools, tokens[-TAIL:])


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
    thinking: str = ""
    """Part of the thinking that a stream has sent."""
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
        tools: tools of the request.
        before: the last tokens of the prompt.
    """

    def __init__(self, service: Service, body: ChatBody, call: Call, tools: ToolSchemas, before: Sequence[int]) -> None:
        self.call, self.stream = call, body.stream
        self._service, self._body, self._tools, self._before = service, body, tools, before
        self._replies = service.renderer.replies
        self._opened = self._replies.opens_thinking(before)
        self._is_read = bool(tools) or self._replies.format.visible is not None
        """True if replies are read: as tool calls, or as a format that never writes plain text."""
        self._head: Event = {"id": call.id, "created": int(time.time()), "model": service.name}
        decode = service.decoder(keep_special=self._is_read or not body.skip_special_tokens)
        self._choices = [_Choice(Sampled(r, TextStream(decode, r.sampling.stop))) for r in call.requests]

    def take(self, place: int, chunk: Chunk) -> None:
        self._choices[place].sampled.take(chunk)

    def events(self, place: int) -> list[Event]:
        choice = self._choices[place]
        out: list[Event] = []
        if not choice.has_begun:
            choice.has_begun = True
            out.append(self._event(place, {"role": "assistant", "content": ""}))
        ended = choice.sampled.finish is not None
        thinking, text = self._final(choice) if ended else self._certain(choice)
        thought, choice.thinking = thinking[len(choice.thinking) :], thinking
        new, choice.content = text[len(choice.content) :], text
        logprobs = self._logprobs(choice, choice.sampled.num_new)
        if thought:
            out.append(self._event(place, {"reasoning_content": thought}))
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
            thinking, content = self._final(choice)
            message: dict[str, JSON] = {"role": "assistant", "content": content, "refusal": None}
            if thinking:
                message["reasoning_content"] = thinking
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
        return {"content": choice.sampled.shown_logprobs(self._service.renderer.decode, num_last), "refusal": None}

    def _certain(self, choice: _Choice) -> tuple[str, str]:
        """Parts of the thinking and of the content that no later token can change."""
        text = choice.sampled.text.certain
        return self._replies.visible(text, opened=self._opened) if self._is_read else ("", text)

    def _final(self, choice: _Choice) -> tuple[str, str]:
        """Thinking and content of a choice that has ended; its tool calls are noted. A reply with a malformed call stays its text."""
        text = choice.sampled.text.certain
        if not self._is_read:
            return "", text
        request = choice.sampled.request
        parsed = self._service.renderer.parse(choice.sampled.tokens, self._tools, self._before, request.sampling.stop)
        thinking = parsed.message.reasoning_content or ""
        if self._tools and not parsed.malformed:
            ids = self._replies.format.keeps_ids
            choice.tool_calls = [_wire_call(call, keeps_id=ids) for call in parsed.message.tool_calls]
        if choice.tool_calls or self._replies.format.visible is not None:
            return thinking, parsed.message.content
        body = self._replies.split(text, opened=self._opened).body if self._replies.puts_apart else text
        return thinking, body.strip("\n")


def _wire_call(call: ToolCall, *, keeps_id: bool) -> Event:
    """A tool call as OpenAI sends it, with an id that no other reply's calls have, or the one that the model wrote."""
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id if keeps_id else f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
