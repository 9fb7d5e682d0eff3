"""`/v1/responses`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from whet.data.parsers import ToolSchemas
from whet.serve.answers import Event
from whet.serve.bodies import parse_body
from whet.serve.bounds import check_alternatives
from whet.serve.calls import Call
from whet.serve.constraints import native_grammars, reply_grammar
from whet.serve.errors import ApiError
from whet.serve.reply import SampledReply, one_call
from whet.serve.responses_body import ResponsesBody
from whet.serve.responses_input import alternatives_of, check_stateless, choice_of, format_of, messages_of, tools_of
from whet.serve.responses_items import ItemStream, call_item, message_item, reasoning_item
from whet.serve.sampling import new_seed
from whet.serve.service import Service
from whet.types import JSON, Chunk, Finish

ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user", "prompt_cache_key", "safety_identifier")
"""Fields of a request that its response repeats."""


async def prepare_response(service: Service, value: JSON) -> ResponseAnswer:
    """A body as an answer to be filled.

    Raises:
        ApiError: it cannot be answered.
    """
    body = parse_body(ResponsesBody, value)
    service.check_model(body.model)
    check_stateless(body)
    tools, messages = tools_of(body), messages_of(body)
    formats = {"text.format": format_of(body)} | native_grammars(body.json_schema, body.regex, body.ebnf)
    effort = None if body.reasoning is None else body.reasoning.effort
    thinking = None if effort is None else effort != "none"
    tokens = await service.prompt(messages, tools, thinking=thinking, drop_thinking=True)
    opened = service.renderer.replies.opens_thinking(tokens)
    if thinking is False and opened:
        message = "reasoning.effort cannot be none: the model's chat template begins every reply with thinking"
        raise ApiError(400, message, param="reasoning.effort", code="unsupported_parameter")
    grammar = await reply_grammar(service, choice_of(body), tools, parallel=body.parallel_tool_calls, formats=formats, opened=opened)
    room, alternatives = service.room(tokens, "input"), alternatives_of(body)
    max_tokens = room if body.max_output_tokens is None else min(room, body.max_output_tokens)
    if alternatives is not None:
        check_alternatives(max_tokens, alternatives, "top_logprobs")
    sampling = body.params(
        service.renderer.stop_token_ids,
        {},
        max_tokens=max_tokens,
        grammar=grammar,
        seed=new_seed() if body.seed is None else body.seed,
        raw_logprobs=alternatives is not None,
        top_logprobs=alternatives,
    )
    call = one_call(service, f"resp_{uuid.uuid4().hex}", tokens, sampling, stream=body.stream)
    return ResponseAnswer(service, body, call, tools=tools)


class ResponseAnswer:
    """Fills in a response.

    Args:
        service: the service.
        body: body of the request.
        call: its engine request.
        tools: tools that the reply may call.
    """

    names_events = True

    def __init__(self, service: Service, body: ResponsesBody, call: Call, *, tools: ToolSchemas) -> None:
        self.call, self.stream = call, body.stream
        self._service, self._body = service, body
        self._reply = SampledReply(service, call.requests[0], tools)
        self._items = ItemStream()
        self._began_s = int(time.time())

    def take(self, place: int, chunk: Chunk) -> None:
        sampled = self._reply.sampled
        sampled.take(chunk)
        if sampled.request.sampling.raw_logprobs:
            self._items.logprobs += sampled.shown_logprobs(self._service.renderer.decode, sampled.num_new)

    def events(self, place: int) -> list[Event]:
        items, parts = self._items, self._reply.parts()
        out: list[Event] = []
        if not items.num_events:
            out += [items.event(f"response.{word}", response=self._response("in_progress")) for word in ("created", "in_progress")]
        out += items.grown("reasoning", parts.thinking)
        out += items.grown("message", parts.words)
        if self._reply.sampled.finish is not None:
            status, error = self._status()
            out += [] if parts.words or parts.calls else items.opened("message")
            out += items.closed("completed" if status == "completed" else "incomplete")
            for call in parts.calls:
                out += items.called(call_item(call))
            out.append(items.event(f"response.{status}", response=self._response(status, error)))
        return out

    def closing(self) -> list[Event]:
        return []

    def failed(self, error: ApiError) -> list[Event]:
        fault = {"code": "server_error", "message": str(error)}
        return [self._items.event("response.failed", response=self._response("failed", fault))]

    def whole(self) -> Event:
        parts = self._reply.parts()
        status, error = self._status()
        ended = "completed" if status == "completed" else "incomplete"
        if parts.thinking:
            self._items.done.append(reasoning_item(parts.thinking, ended))
        if parts.words or not parts.calls:
            self._items.done.append(message_item(parts.words, ended, self._items.logprobs))
        self._items.done += map(call_item, parts.calls)
        return self._response(status, error)

    def _status(self) -> tuple[str, Mapping[str, JSON] | None]:
        """The status of a response that has ended, and its error."""
        finish = self._reply.sampled.finish
        if finish is Finish.ABORT:
            return "failed", {"code": "server_error", "message": f"the reply was ended: {self.call.abort_reason or 'by the engine'}"}
        return ("incomplete" if finish is Finish.LENGTH else "completed"), None

    def _response(self, status: str, error: JSON = None) -> Event:
        body = self._body
        ended = status != "in_progress"
        return {
            **{name: getattr(body, name) for name in ECHOED},
            "id": self.call.id,
            "object": "response",
            "created_at": self._began_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._service.name,
            "output": list(self._items.done) if ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} if body.reasoning is None else body.reasoning.model_dump(),
            "store": False,
            "text": {"format": {"type": "text"}} if body.text is None or body.text.format is None else {"format": body.text.format},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> Event:
        sampled, thinking = self._reply.sampled, self._reply.parts().thinking
        num_prompt, num_sampled = len(sampled.request.tokens), len(sampled.tokens)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": sampled.num_cached, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": len(self._service.renderer.encode(thinking)) if thinking else 0},
            "total_tokens": num_prompt + num_sampled,
        }
