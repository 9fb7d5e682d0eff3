"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

from whet.data.parsers import ToolSchemas
from whet.serve.answers import Event
from whet.serve.anthropic_body import MessagesBody, PromptBody
from whet.serve.anthropic_input import check_context, messages_of, tools_of
from whet.serve.bodies import parse_body
from whet.serve.calls import Call
from whet.serve.constraints import ToolChoice, native_grammars, reply_grammar
from whet.serve.errors import ApiError
from whet.serve.reply import AnswerParts, SampledReply, one_call
from whet.serve.sampling import new_seed
from whet.serve.service import Service
from whet.types import JSON, Chunk, Finish, Grammar, ToolCall

PING_S = 10.0
"""A stream that has nothing to say for as long, since a tool call is being written, says so."""
CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's names of the choices among tools."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: tuple[int, ...]
    tools: ToolSchemas


async def prepare_messages(service: Service, value: JSON) -> MessagesAnswer:
    """A body as an answer to be filled.

    Raises:
        ApiError: it cannot be answered.
    """
    body = parse_body(MessagesBody, value)
    prompt = await _prompt(service, body)
    grammar = await _grammar(service, body, prompt)
    sampling = body.params(
        service.renderer.stop_token_ids,
        {"stop": "stop_sequences"},
        max_tokens=min(body.max_tokens, service.room(prompt.tokens, "messages")),
        grammar=grammar,
        seed=new_seed() if body.seed is None else body.seed,
    )
    call = one_call(service, f"msg_{uuid.uuid4().hex}", prompt.tokens, sampling, stream=body.stream)
    return MessagesAnswer(service, call, stream=body.stream, tools=prompt.tools)


async def count_tokens(service: Service, value: JSON) -> Response:
    """Answer with the number of a prompt's tokens."""
    prompt = await _prompt(service, parse_body(PromptBody, value))
    return JSONResponse({"input_tokens": len(prompt.tokens)})


async def _prompt(service: Service, body: PromptBody) -> _Prompt:
    service.check_model(body.model)
    check_context(body)
    tools, messages = tools_of(body), messages_of(body)
    thinking = None if body.thinking is None else {"enabled": True, "disabled": False}.get(body.thinking.type)
    tokens = await service.prompt(messages, tools, thinking=thinking, drop_thinking=True)
    if thinking is False and service.renderer.replies.opens_thinking(tokens):
        message = "thinking cannot be disabled: the model's chat template begins every reply with thinking"
        raise ApiError(400, message, param="thinking", code="unsupported_parameter")
    return _Prompt(tokens, tools)


async def _grammar(service: Service, body: MessagesBody, prompt: _Prompt) -> Grammar | None:
    choice: ToolChoice = None
    parallel = None
    if body.tool_choice is not None:
        choice = CHOICES.get(body.tool_choice.type) or {"type": "function", "function": {"name": body.tool_choice.name}}
        parallel = None if not body.tool_choice.disable_parallel_tool_use or choice == "none" else False
        if parallel is False and choice == "auto":
            message = "tool_choice: disable_parallel_tool_use needs type any or tool: a free reply calls as many as it likes"
            raise ApiError(400, message, param="tool_choice.disable_parallel_tool_use", code="unsupported_parameter")
    formats = native_grammars(body.json_schema, body.regex, body.ebnf)
    if body.output_config is not None and body.output_config.format is not None:
        formats = {"output_config.format": Grammar("json_schema", json.dumps(body.output_config.format.body)), **formats}
    opened = service.renderer.replies.opens_thinking(prompt.tokens)
    return await reply_grammar(service, choice, prompt.tools, parallel=parallel, formats=formats, opened=opened)


class MessagesAnswer:
    """Fills in a message.

    Args:
        service: the service.
        call: its engine request.
        stream: True if its client wants events.
        tools: tools that the reply may call.
    """

    names_events = True

    def __init__(self, service: Service, call: Call, *, stream: bool, tools: ToolSchemas) -> None:
        self.call, self.stream = call, stream
        self._service = service
        self._reply = SampledReply(service, call.requests[0], tools)
        self._sent = {"thinking": "", "text": ""}
        self._open = ""
        """Kind of the block that a stream is writing; empty: none."""
        self._num_blocks = 0
        self._spoke_s = 0.0
        """When a stream sent its last event; 0: it sent none."""

    def take(self, place: int, chunk: Chunk) -> None:
        self._reply.sampled.take(chunk)

    def events(self, place: int) -> list[Event]:
        out: list[Event] = []
        if not self._spoke_s:
            start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
            out += [{"type": "message_start", "message": start}, {"type": "ping"}]
        parts = self._parts()
        out += self._grown("thinking", parts.thinking)
        out += self._grown("text", parts.words)
        if self._reply.sampled.finish is not None:
            out += self._closed()
            for call in parts.calls:
                out += self._called(call)
            out.append({"type": "message_delta", "delta": self._end(parts), "usage": self._usage()})
            out.append({"type": "message_stop"})
        now = time.monotonic()
        if not out and now - self._spoke_s > PING_S:
            out.append({"type": "ping"})
        self._spoke_s = now if out else self._spoke_s
        return out

    def closing(self) -> list[Event]:
        return []

    def failed(self, error: ApiError) -> list[Event]:
        return [error.to_anthropic()]

    def whole(self) -> Event:
        parts = self._parts()
        content: list[Event] = []
        if parts.thinking:
            content.append({"type": "thinking", "thinking": parts.thinking, "signature": self.call.id})
        if parts.words:
            content.append({"type": "text", "text": parts.words})
        content += [_block(call, dict(call.arguments)) for call in parts.calls]
        return {**self._head(), "content": content, **self._end(parts), "usage": self._usage()}

    def _parts(self) -> AnswerParts:
        """The reply so far.

        Raises:
            ApiError: it was ended from outside; Anthropic's messages have no name for that.
        """
        if self._reply.sampled.finish is Finish.ABORT:
            raise ApiError(503, f"the reply was ended: {self.call.abort_reason or 'by the engine'}", code="aborted")
        return self._reply.parts()

    def _head(self) -> dict[str, JSON]:
        return {"id": self.call.id, "type": "message", "role": "assistant", "model": self._service.name}

    def _usage(self) -> Event:
        """Tokens; those of the prompt that were in the cache count apart."""
        sampled = self._reply.sampled
        return {
            "input_tokens": len(sampled.request.tokens) - sampled.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": sampled.num_cached,
            "output_tokens": len(sampled.tokens),
        }

    def _end(self, parts: AnswerParts) -> dict[str, JSON]:
        """Why the message ended."""
        if self._reply.sampled.finish is Finish.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if parts.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = self._reply.matched_stop
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}

    def _grown(self, kind: str, text: str) -> list[Event]:
        """Events for what thinking or text has more than was sent of it."""
        new = text[len(self._sent[kind]) :]
        if not new:
            return []
        self._sent[kind] = text
        out: list[Event] = []
        if self._open != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            out += [*self._closed(), self._begun({"type": kind, **empty})]
            self._open = kind
        return [*out, self._delta({"type": f"{kind}_delta", kind: new})]

    def _closed(self) -> list[Event]:
        """Events that end the block that is open."""
        kind, self._open = self._open, ""
        signature = [self._delta({"type": "signature_delta", "signature": self.call.id})] if kind == "thinking" else []
        return [*signature, self._stopped()] if kind else []

    def _called(self, call: ToolCall) -> list[Event]:
        written = json.dumps(dict(call.arguments), ensure_ascii=False)
        begun = self._begun(_block(call, {}))
        return [begun, self._delta({"type": "input_json_delta", "partial_json": written}), self._stopped()]

    def _begun(self, block: Event) -> Event:
        self._num_blocks += 1
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _stopped(self) -> Event:
        return {"type": "content_block_stop", "index": self._num_blocks - 1}


def _block(call: ToolCall, arguments: JSON) -> Event:
    """A tool call, with an id that no other reply's calls have."""
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name, "input": arguments}
