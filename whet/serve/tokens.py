"""vLLM's `/inference/v1/generate`: token ids in and out, with log-probs and the weights' versions."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import JSONResponse, Response

from whet.serve.answers import Event, PlainEvents, Sampled, usage_of
from whet.serve.bodies import Body, parse_body
from whet.serve.bounds import Count, GrammarText, Ids, Name, Positive, Seed, check_alternatives, context_of
from whet.serve.calls import Call
from whet.serve.constraints import ANY_OBJECT, one_grammar
from whet.serve.errors import ApiError
from whet.serve.sampling import SamplingBody, new_seed
from whet.serve.service import Service
from whet.serve.text import TextStream
from whet.types import JSON, Chunk, Finish, Grammar, Request, Scored

PREFIX = "generate-tokens-"
"""vLLM puts it before a request's id; an abort names the request with it."""
MAX_CHOICES = 1000
MAX_ABORTS = 100_000


class StructuredOutputs(Body):
    """vLLM's forms of a reply; one of them."""

    json_schema: GrammarText | dict[str, Any] | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    choice: Annotated[list[GrammarText], Field(max_length=MAX_CHOICES)] | None = None
    json_object: bool | None = None

    def grammars(self) -> dict[str, Grammar | None]:
        """The grammars, by their fields."""
        schema = json.dumps(self.json_schema) if isinstance(self.json_schema, dict) else self.json_schema
        choice = None if self.choice is None else "|".join(map(re.escape, self.choice))
        return {
            "structured_outputs.json": None if schema is None else Grammar("json_schema", schema),
            "structured_outputs.regex": None if self.regex is None else Grammar("regex", self.regex),
            "structured_outputs.grammar": None if self.grammar is None else Grammar("ebnf", self.grammar),
            "structured_outputs.choice": None if choice is None else Grammar("regex", choice),
            "structured_outputs.json_object": Grammar("json_schema", ANY_OBJECT) if self.json_object else None,
        }


class TokenSampling(SamplingBody):
    """vLLM's sampling parameters."""

    n: Positive = 1
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    seed: Seed | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    """Alternatives to tell for each token, in addition to its own log-prob; none: no log-probs."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    """The same for the prompt's tokens: the model's own, at temperature 1."""
    structured_outputs: StructuredOutputs | None = None
    detokenize: bool = True
    """Accepted without effect: the answer has ids alone."""
    include_stop_str_in_output: bool = False
    """Accepted without effect: the ids end with the stop text, whatever it says."""
    spaces_between_special_tokens: bool = True


class TokensBody(Body):
    """vLLM's generation request."""

    request_id: Name | None = None
    model: Name | None = None
    token_ids: Ids
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    cache_salt: Name | None = None
    """Accepted without effect: what older weights cached is never read."""
    priority: int = 0
    """Accepted without effect: calls are served in their order."""
    output_mode: Literal["tokens"] = "tokens"
    return_token_ids: bool = False
    """Also tell the prompt's ids."""


class AbortRequestsBody(Body):
    """Which requests to end; none: all."""

    request_ids: Annotated[list[Name], Field(max_length=MAX_ABORTS)]


async def prepare_tokens(service: Service, value: JSON) -> TokensAnswer:
    """A body as an answer to be filled.

    Raises:
        ApiError: it cannot be answered.
    """
    body = parse_body(TokensBody, value)
    service.check_model(body.model)
    if not body.token_ids:
        raise ApiError(400, "a prompt is empty", param="token_ids")
    wish = parse_body(TokenSampling, body.sampling_params)
    service.check_samples(wish.n)
    room = service.room(body.token_ids, "token_ids")
    wanted = {} if wish.structured_outputs is None else wish.structured_outputs.grammars()
    grammar = await one_grammar(service, wanted)
    greedy = wish.temperature is not None and wish.temperature < 1e-6
    params = wish.params(
        service.renderer.stop_token_ids,
        {},
        max_tokens=room if wish.max_tokens is None else wish.max_tokens,
        min_tokens=wish.min_tokens,
        grammar=grammar,
        raw_logprobs=wish.logprobs is not None and greedy,
        top_logprobs=wish.logprobs,
    )
    if wish.logprobs:
        check_alternatives(params.max_tokens * wish.n, wish.logprobs, "logprobs")
    if wish.prompt_logprobs:
        check_alternatives(len(body.token_ids), wish.prompt_logprobs, "prompt_logprobs")
    name = PREFIX + (uuid.uuid4().hex if body.request_id is None else body.request_id)
    seed = new_seed() if wish.seed is None else wish.seed
    every = service.config.stream_interval if body.stream else 0
    context = context_of(body.token_ids)
    requests = tuple(
        Request(name if wish.n == 1 else f"{name}_{i}", context, replace(params, seed=seed + i), chunk_tokens=every) for i in range(wish.n)
    )
    call = Call(name, requests, score=wish.prompt_logprobs is not None, top_scores=wish.prompt_logprobs or 0)
    return TokensAnswer(service, body, wish, call)


async def abort_requests(service: Service, value: JSON) -> Response:
    """End requests, named as vLLM's server names them or as their clients do. Their callers get the tokens sampled so far."""
    ids = parse_body(AbortRequestsBody, value).request_ids
    reason = "aborted by /inference/v1/abort_requests"
    if not ids:
        await service.calls.abort_all(reason)
    for each in ids:
        await service.calls.abort(PREFIX + each.removeprefix(PREFIX), reason)
    return JSONResponse({"status": "aborted", "aborted": len(ids)})


class TokensAnswer(PlainEvents):
    """Fills in generations.

    Args:
        service: the service.
        body: body of the request.
        wish: its sampling parameters.
        call: its engine requests.
    """

    def __init__(self, service: Service, body: TokensBody, wish: TokenSampling, call: Call) -> None:
        self.call, self.stream = call, body.stream
        self._service, self._body, self._wish = service, body, wish
        decode = service.decoder(keep_special=True)
        self._sampled = [Sampled(request, TextStream(decode, ()), keep_stop=True) for request in call.requests]
        self._has_begun = False
        """True once a stream sent its first event, which tells of the prompt."""

    def take(self, place: int, chunk: Chunk) -> None:
        self._sampled[place].take(chunk)

    def events(self, place: int) -> list[Event]:
        sampled = self._sampled[place]
        event = self._answer([self._choice(place, len(sampled.tokens) - sampled.num_new)], tell_prompt=not self._has_begun)
        self._has_begun = True
        return [event]

    def closing(self) -> list[Event]:
        return []

    def whole(self) -> JSON:
        answer = self._answer([self._choice(place, 0) for place in range(len(self._sampled))], tell_prompt=True)
        return {**answer, "usage": usage_of(self._sampled, len(self._sampled))}

    def _answer(self, choices: list[JSON], *, tell_prompt: bool) -> dict[str, JSON]:
        out: dict[str, JSON] = {"request_id": self.call.id.removeprefix(PREFIX), "output_mode": "tokens", "choices": choices, "usage": None}
        if tell_prompt and 0 in self.call.scores:
            out["prompt_logprobs"] = self._prompt_logprobs(self.call.scores[0])
        if tell_prompt and self._body.return_token_ids:
            out["prompt_token_ids"] = list(self._body.token_ids)
        return out

    def _choice(self, place: int, first: int) -> JSON:
        """A choice with the tokens from the place `first` on."""
        sampled = self._sampled[place]
        finish, stop = self._finish(sampled)
        spans = None if sampled.finish is None else self._spans(sampled)
        return {
            "index": place,
            "token_ids": sampled.tokens[first:],
            "logprobs": None if self._wish.logprobs is None else {"content": self._content(sampled, first)},
            "finish_reason": finish,
            "stop_reason": stop,
            "weight_versions": spans,
            "sampling_mask": None,
            "routed_experts": None,
        }

    def _finish(self, sampled: Sampled) -> tuple[str | None, int | str | None]:
        """The finish reason, and the stop that ended it unless that is the tokenizer's."""
        if sampled.finish is not Finish.STOP:
            return None if sampled.finish is None else sampled.finish.value, None
        if (token := sampled.matched_token) is not None:
            return "stop", None if token in self._service.renderer.stop_token_ids else token
        text = self._service.renderer.decode(sampled.tokens)
        return "stop", min((stop for stop in sampled.request.sampling.stop if stop in text), key=text.find, default=None)

    def _content(self, sampled: Sampled, first: int) -> list[JSON]:
        """Log-probs of the distribution sampled from, at temperature 0 of the model's own."""
        chosen = sampled.logprobs if sampled.request.sampling.temperature > 0 else sampled.raw_logprobs
        tops = sampled.top_logprobs[first:] or [()] * len(sampled.tokens[first:])
        return [
            {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": _ranked(top)}
            for token, logprob, top in zip(sampled.tokens[first:], chosen[first:], tops, strict=True)
        ]

    def _spans(self, sampled: Sampled) -> list[JSON]:
        """The versions of a reply's tokens, run by run."""
        out: list[JSON] = []
        start = 0
        for version, run in groupby(sampled.versions):
            end = start + len(list(run))
            out.append({"version": self._service.control.label(version), "start": start, "end": end})
            start = end
        return out

    def _prompt_logprobs(self, scored: Scored) -> list[JSON]:
        """For each place the log-probs by token id; the first has none."""
        out: list[JSON] = [None]
        tops = scored.top_logprobs or [()] * len(scored.logprobs)
        for token, logprob, top in zip(self._body.token_ids[1:], scored.logprobs, tops, strict=True):
            places: dict[str, JSON] = {
                str(each): {"logprob": found, "rank": rank, "decoded_token": None} for rank, (each, found) in enumerate(top, 1)
            }
            out.append({**places, str(token): places.get(str(token), {"logprob": logprob, "rank": None, "decoded_token": None})})
        return out


def _ranked(top: tuple[tuple[int, float], ...]) -> list[JSON]:
    return [{"token_id": token, "logprob": logprob, "rank": rank} for rank, (token, logprob) in enumerate(top, 1)]
