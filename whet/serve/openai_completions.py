"""`/v1/completions`."""

from __future__ import annotations

import time
import uuid
from itertools import accumulate
from typing import Annotated, cast

from pydantic import Field

from whet.serve.answers import Event, PlainEvents, Sampled, usage_of
from whet.serve.bodies import parse_body
from whet.serve.bounds import MAX_PROMPTS, IdLists, Ids, Positive, check_alternatives
from whet.serve.calls import Call
from whet.serve.constraints import native_grammars, one_grammar
from whet.serve.errors import ApiError
from whet.serve.openai_body import OpenAIBody, params_of, requests_of
from whet.serve.service import Service
from whet.serve.text import TextStream
from whet.types import JSON, Chunk, Request

TopTokens = tuple[tuple[int, float], ...]
DEFAULT_TOKENS = 16
"""OpenAI's max_tokens where a request names none."""


class CompletionBody(OpenAIBody):
    """OpenAI's completion request."""

    prompt: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | Ids | IdLists = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    """Begin the text with the prompt, log-probs included; then max_tokens may be 0."""
    best_of: Positive | None = None


async def prepare_completion(service: Service, value: JSON) -> CompletionAnswer:
    """A body as an answer to be filled.

    Raises:
        ApiError: it cannot be answered.
    """
    body = parse_body(CompletionBody, value)
    service.check_model(body.model)
    num = body.n or 1
    if body.best_of not in (None, num):
        message = f"best_of is {body.best_of}, but {num} choices are answered and none is left out: set n to as many as are wanted"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    prompts = await _prompts(service, body, num)
    limit = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    silent = bool(body.echo) and limit == 0
    grammar = await one_grammar(service, native_grammars(body.json_schema, body.regex, body.ebnf))
    call_id = f"cmpl-{uuid.uuid4().hex}"
    requests: list[Request] = []
    for i, (tokens, _) in enumerate(prompts):
        service.room(tokens, "prompt")
        sampling = params_of(service, body, 1 if silent else limit, body.logprobs, grammar)
        requests += requests_of(service, body, f"{call_id}-{i}", tokens, sampling)
    scored = bool(body.echo) and body.logprobs is not None
    if scored:
        check_alternatives(sum(len(request.tokens) for request in requests), body.logprobs or 0, "logprobs")
    call = Call(call_id, tuple(requests), score=scored, top_scores=body.logprobs or 0, generate=not silent)
    return CompletionAnswer(service, body, call, [text for _, text in prompts])


async def _prompts(service: Service, body: CompletionBody, num: int) -> list[tuple[tuple[int, ...], str]]:
    """Each prompt's tokens and its text; `num` samples of each are asked for."""
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts = cast(list[str | list[int]], [body.prompt] if single else body.prompt)
    if not all(prompts):
        raise ApiError(400, "a prompt is empty", param="prompt")
    service.check_samples(len(prompts) * num)
    out: list[tuple[tuple[int, ...], str]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            out.append((await service.encode(prompt, "prompt"), prompt))
        else:
            service.room(prompt, "prompt")
            out.append((tuple(prompt), await service.text_of(prompt) if body.echo else ""))
    return out


class CompletionAnswer(PlainEvents):
    """Fills in text completions.

    Args:
        service: the service.
        body: body of the request.
        call: its engine requests, n for each prompt.
        texts: texts of the prompts.
    """

    def __init__(self, service: Service, body: CompletionBody, call: Call, texts: list[str]) -> None:
        self.call, self.stream = call, body.stream
        self._service, self._body = service, body
        self._num_each = len(call.requests) // len(texts)
        self._head: Event = {"id": call.id, "object": "text_completion", "created": int(time.time()), "model": service.name}
        decode = service.decoder(keep_special=not body.skip_special_tokens)
        self._choices = [Sampled(request, TextStream(decode, request.sampling.stop)) for request in call.requests]
        self._texts = [texts[i // self._num_each] if body.echo else "" for i in range(len(call.requests))]
        """Text that each choice begins with, before anything is sampled."""
        self._given = [0] * len(call.requests)
        """Characters of each choice that a stream has given out."""
        self._reported = [0] * len(call.requests)
        """Number of tokens of each choice whose log-probs were sent, those of an echoed prompt
        included, and their characters."""
        self._offsets = [0] * len(call.requests)

    def take(self, place: int, chunk: Chunk) -> None:
        self._choices[place].take(chunk)

    def events(self, place: int) -> list[Event]:
        text = self._text(place)[self._given[place] :]
        self._given[place] += len(text)
        usage = {"usage": None} if self._body.wants_usage else {}
        return [{**self._head, "choices": [self._choice(place, text)], **usage}]

    def closing(self) -> list[Event]:
        return [{**self._head, "choices": [], "usage": self._usage()}] if self._body.wants_usage else []

    def whole(self) -> Event:
        choices = [self._choice(place, self._text(place)) for place in range(len(self._choices))]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> Event:
        return usage_of(self._choices, self._num_each)

    def _text(self, place: int) -> str:
        return self._texts[place] + self._choices[place].text.certain

    def _choice(self, place: int, text: str) -> Event:
        logprobs = None if self._body.logprobs is None else self._logprobs(place)
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": self._choices[place].finish}

    def _logprobs(self, place: int) -> Event:
        """Log-probs of the tokens not yet sent, under the model's own distribution. Offsets count the
        tokens' own texts."""
        decode, sampled, first = self._service.renderer.decode, self._choices[place], self._reported[place]
        tokens: list[int] = [*sampled.tokens]
        logprobs: list[float | None] = [*sampled.raw_logprobs]
        tops: list[TopTokens | None] = [*sampled.top_logprobs]
        scored = self.call.scores.get(place)
        if scored is not None:
            tokens = [*sampled.request.tokens, *tokens]
            logprobs = [None, *scored.logprobs, *logprobs]
            tops = [None, *(scored.top_logprobs or [()] * len(scored.logprobs)), *tops]
        self._reported[place] = len(tokens)
        texts = [decode([token]) for token in tokens[first:]]
        *offsets, self._offsets[place] = accumulate(map(len, texts), initial=self._offsets[place])
        return {
            "tokens": texts,
            "token_logprobs": logprobs[first:],
            "top_logprobs": [None if top is None else {decode([token]): logprob for token, logprob in top} for top in tops[first:]],
            "text_offset": offsets,
        }
