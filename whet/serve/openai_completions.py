"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from itertools import accumulate
from typing import cast

from pydantic import Field

from whet.serve.answers import Event, Sampled, usage_of
from whet.serve.bodies import parse_body
from whet.serve.calls import Call
from whet.serve.errors import ApiError
from whet.serve.openai_body import OpenAIBody, params_of, requests_of
from whet.serve.service import Service
from whet.serve.text import TextStream
from whet.types import JSON, Chunk, Request

DEFAULT_TOKENS = 16
"""OpenAI's max_tokens where a request names none."""


class CompletionBody(OpenAIBody):
    """OpenAI's completion request."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)


async def prepare_completion(service: Service, value: JSON) -> CompletionAnswer:
    """A body as an answer to be filled.

    Raises:
        ApiError: it cannot be answered.
    """
    body = parse_body(CompletionBody, value)
    service.check_model(body.model)
    prompts = await _prompts(service, body)
    service.check_samples(len(prompts) * (body.n or 1))
    call_id = f"cmpl-{uuid.uuid4().hex}"
    requests: list[Request] = []
    for i, tokens in enumerate(prompts):
        service.room(tokens, "prompt")
        limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        requests += requests_of(service, body, f"{call_id}-{i}", tokens, params_of(service, body, limit, body.logprobs))
    return CompletionAnswer(service, body, Call(call_id, tuple(requests)), sum(map(len, prompts)))


async def _prompts(service: Service, body: CompletionBody) -> list[tuple[int, ...]]:
    """Each prompt's tokens."""
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts = cast(list[str | list[int]], [body.prompt] if single else body.prompt)
    if not all(prompts):
        raise ApiError(400, "a prompt is empty", param="prompt")
    return [await service.encode(prompt, "prompt") if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]


class CompletionAnswer:
    """Fills in text completions.

    Args:
        service: what is served.
        body: what was asked.
        call: its engine requests, n for each prompt.
        num_prompt: tokens of all prompts.
    """

    def __init__(self, service: Service, body: CompletionBody, call: Call, num_prompt: int) -> None:
        self.call, self.stream = call, body.stream
        self._service, self._body, self._num_prompt = service, body, num_prompt
        self._head: Event = {"id": call.id, "object": "text_completion", "created": int(time.time()), "model": service.name}
        decode = service.decoder(keep_special=not body.skip_special_tokens)
        self._choices = [Sampled(request, TextStream(decode, request.sampling.stop)) for request in call.requests]
        self._given = [0] * len(call.requests)
        """Characters of each choice that a stream has given out."""
        self._offsets = [0] * len(call.requests)
        """Characters of each choice's tokens whose log-probs were told."""

    def take(self, place: int, chunk: Chunk) -> None:
        self._choices[place].take(chunk)

    def events(self, place: int) -> list[Event]:
        sampled = self._choices[place]
        text = sampled.text.certain[self._given[place] :]
        self._given[place] += len(text)
        usage = {"usage": None} if self._body.wants_usage else {}
        return [{**self._head, "choices": [self._choice(place, text, sampled.num_new)], **usage}]

    def closing(self) -> list[Event]:
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._body.wants_usage else []

    def whole(self) -> Event:
        choices = [self._choice(i, sampled.text.certain, len(sampled.tokens)) for i, sampled in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> Event:
        return usage_of(self._num_prompt, sum(len(sampled.tokens) for sampled in self._choices))

    def _choice(self, place: int, text: str, num_last: int) -> Event:
        sampled = self._choices[place]
        logprobs = None if self._body.logprobs is None else self._logprobs(place, num_last)
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": sampled.finish}

    def _logprobs(self, place: int, num_last: int) -> Event:
        """Of the last so many tokens, under the model's own distribution. Offsets count the tokens' own texts."""
        decode, sampled = self._service.renderer.decode, self._choices[place]
        first = len(sampled.tokens) - num_last
        texts = [decode([token]) for token in sampled.tokens[first:]]
        *offsets, self._offsets[place] = accumulate(map(len, texts), initial=self._offsets[place])
        return {
            "tokens": texts,
            "token_logprobs": sampled.raw_logprobs[first:],
            "top_logprobs": [{decode([token]): logprob for token, logprob in top} for top in sampled.top_logprobs[first:]],
            "text_offset": offsets,
        }
