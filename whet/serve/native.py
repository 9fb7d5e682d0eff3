"""SGLang's `/generate`: token ids in and out, with log-probs and the weights' version."""

from __future__ import annotations

import time
import uuid
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from whet.serve.answers import Event, PlainEvents, Sampled
from whet.serve.bodies import Body, parse_body
from whet.serve.bounds import (
    MAX_PROMPTS,
    Count,
    IdLists,
    Ids,
    Name,
    Positive,
    Seed,
    check_alternatives,
    context_of,
)
from whet.serve.calls import Call
from whet.serve.constraints import native_grammars, one_grammar
from whet.serve.errors import ApiError
from whet.serve.sampling import SamplingBody, new_seed
from whet.serve.service import Service
from whet.serve.text import TextStream
from whet.types import JSON, Chunk, Finish, Grammar, Request, SamplingParams, Scored
from whet.types.routes import Routes

T = TypeVar("T")

REPEATS = 32
"""About how often a stream whose events hold everything so far repeats a token at most."""
MAX_KEPT = 4096
"""Ids that a token may have been drawn from, where they are reported; SGLang's `--sampling-mask-max-tokens`."""
NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


class NativeSampling(SamplingBody):
    """SGLang's sampling parameters."""

    max_new_tokens: Count | None = 128
    min_new_tokens: Count | None = None
    no_stop_trim: bool = False
    spaces_between_special_tokens: bool = True
    """Accepted without effect: fast tokenizers write no such spaces."""
    n: Positive = 1
    sampling_seed: Seed | None = None
    stream_interval: Positive | None = None
    """Tokens between two events of a stream; none: as the server is set."""


class GenerateBody(Body):
    """SGLang's generation request."""

    text: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] | None = None
    input_ids: Ids | IdLists | None = None
    sampling_params: dict[str, Any] | Annotated[list[dict[str, Any]], Field(max_length=MAX_PROMPTS)] | None = None
    rid: Name | Annotated[list[Name], Field(max_length=MAX_PROMPTS)] | None = None
    return_logprob: bool = False
    logprob_start_len: Count = -1
    """From which prompt token on their log-probs are wanted, too, the model's own (temperature 1); -1: none."""
    top_logprobs_num: int = Field(default=0, ge=0, le=100)
    return_text_in_logprobs: bool = False
    stream: bool = False
    incremental_streaming_output: bool = False
    """Each event of a stream holds what is new, as a server of SGLang's gives it that was started with the option of this name."""
    log_metrics: bool = True
    """Accepted without effect: there are no such metrics."""
    return_hidden_states: Literal[False] = False
    return_entropy: Literal[False] = False
    return_bytes: Literal[False] = False
    background: Literal[False] = False
    no_logs: bool = False
    model: Name | None = None
    """Routers add these; accepted without effect, for there is one model."""
    return_routed_experts: bool = False
    """Also tell, at the end, the experts that tokens of a mixture went to: of all but the last one, from `routed_experts_start_len` on."""
    routed_experts_start_len: int = Field(default=0, ge=0)
    return_sampling_mask: bool = False
    """Also tell the ids that each token was drawn from, where top_p, top_k or min_p leave any out."""
    sampling_logprobs_mode: Literal["selected"] = "selected"


async def prepare_generate(service: Service, value: JSON) -> GenerateAnswer:
    """A body as an answer to be filled.

    Raises:
        ApiError: it cannot be answered.
    """
    body = parse_body(GenerateBody, value)
    num = _num_prompts(body)
    service.check_samples(num)
    wishes = [parse_body(NativeSampling, item) for item in _each(body.sampling_params or {}, num, "sampling_params")]
    samples = {wish.n for wish in wishes}
    if len(samples) > 1:
        raise ApiError(400, "n must be the same for all prompts of a batch", param="n")
    n = samples.pop()
    service.check_samples(num * n)
    prompts, batched = await _prompts(service, body)
    generate = {wish.max_new_tokens != 0 for wish in wishes}
    if len(generate) > 1:
        raise ApiError(400, "max_new_tokens is 0 for some prompts of a batch and not for others", param="max_new_tokens")
    names = _each(uuid.uuid4().hex if body.rid is None else body.rid, len(prompts), "rid", join=True)
    requests: list[Request] = []
    for tokens, wish, name in zip(prompts, wishes, names, strict=True):
        room = service.room(tokens, "input_ids" if body.input_ids is not None else "text")
        if body.logprob_start_len >= len(tokens):
            message = f"logprob_start_len is {body.logprob_start_len}, but a prompt has {len(tokens)} tokens"
            raise ApiError(400, message, param="logprob_start_len")
        if body.routed_experts_start_len > len(tokens):
            message = f"routed_experts_start_len is {body.routed_experts_start_len}, but a prompt has {len(tokens)} tokens"
            raise ApiError(400, message, param="routed_experts_start_len")
        grammar = await one_grammar(service, native_grammars(wish.json_schema, wish.regex, wish.ebnf))
        params = _params(service, wish, room, body, grammar)
        every = (wish.stream_interval or service.config.stream_interval) if body.stream else 0
        seed = new_seed() if wish.sampling_seed is None else wish.sampling_seed
        for i in range(n):
            rid = name if n == 1 else f"{name}_{i}"
            sampling, first = replace(params, seed=seed + i), body.routed_experts_start_len + 1
            requests.append(Request(rid, context_of(tokens), sampling, chunk_tokens=every, routes_from=first))
    if body.return_logprob:
        scored = sum(len(request.tokens) for request in requests) if body.logprob_start_len >= 0 else 0
        reported = sum(request.sampling.max_tokens for request in requests)
        check_alternatives(scored + reported, body.top_logprobs_num, "top_logprobs_num")
    if len({request.id for request in requests}) < len(requests):
        raise ApiError(400, "rid names a request twice", param="rid")
    call_id = body.rid if isinstance(body.rid, str) else requests[0].id
    score = body.return_logprob and body.logprob_start_len >= 0
    call = Call(call_id, tuple(requests), score=score, top_scores=body.top_logprobs_num, generate=generate.pop())
    return GenerateAnswer(service, body, call, [wish for wish in wishes for _ in range(n)], batched=batched or n > 1)


def _num_prompts(body: GenerateBody) -> int:
    """Prompts that are asked for, or at least one."""
    given = body.text if body.text is not None else body.input_ids
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


async def _prompts(service: Service, body: GenerateBody) -> tuple[list[tuple[int, ...]], bool]:
    """Each prompt's tokens, and whether there is a list of them."""
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "give either text or input_ids", param="input_ids")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [await service.encode(text, "text") for text in texts]
        batched = not isinstance(body.text, str)
    else:
        ids = body.input_ids or []
        batched = bool(ids) and isinstance(ids[0], list)
        prompts = [tuple(item) for item in ids if isinstance(item, list)] if batched else [tuple(i for i in ids if isinstance(i, int))]
    if not prompts or not all(prompts):
        raise ApiError(400, "a prompt is empty", param="text" if body.text is not None else "input_ids")
    return prompts, batched


def _each(value: T | list[T], num: int, param: str, *, join: bool = False) -> list[T]:
    """A value for each prompt: one for all, or a list. With `join`, one text becomes different ones."""
    if not isinstance(value, list):
        return [f"{value}_{i}" for i in range(num)] if join and num > 1 else [value] * num  # pyright: ignore[reportReturnType]
    if len(value) != num:
        raise ApiError(400, f"{param} is a list of {len(value)}, but there are {num} prompts", param=param)
    return value


def _params(service: Service, wish: NativeSampling, room: int, body: GenerateBody, grammar: Grammar | None) -> SamplingParams:
    greedy = wish.temperature is not None and wish.temperature < 1e-6
    return wish.params(
        service.renderer.stop_token_ids,
        NAMES,
        max_tokens=room if wish.max_new_tokens is None else wish.max_new_tokens or 1,
        min_tokens=wish.min_new_tokens,
        grammar=grammar,
        raw_logprobs=body.return_logprob and greedy,
        top_logprobs=body.top_logprobs_num if body.return_logprob else None,
        nucleus=body.return_sampling_mask,
        routes=body.return_routed_experts,
    )


@dataclass(frozen=True, slots=True)
class _Reported:
    """Part of a sample that the events of a stream have sent."""

    tokens: int
    characters: int


NOTHING = _Reported(0, 0)


def _is_due(num: int, reported: int) -> bool:
    """True if an event that repeats everything is due at `num` tokens, after one at `reported`."""
    return num - reported >= num // REPEATS


class GenerateAnswer(PlainEvents):
    """Fills in generations.

    Args:
        service: the service.
        body: body of the request.
        call: its engine requests, n for each prompt.
        wishes: the sampling parameters of each request.
        batched: True if the client expects a list.
    """

    def __init__(self, service: Service, body: GenerateBody, call: Call, wishes: Sequence[NativeSampling], *, batched: bool) -> None:
        self.call, self.stream = call, body.stream
        self._service, self._body, self._batched = service, body, batched
        self._began = time.monotonic()
        self._reported = [NOTHING] * len(call.requests)
        self._sampled = [
            Sampled(
                request,
                TextStream(service.decoder(keep_special=not wish.skip_special_tokens), () if wish.no_stop_trim else request.sampling.stop),
                keep_stop=wish.no_stop_trim,
            )
            for request, wish in zip(call.requests, wishes, strict=True)
        ]

    def take(self, place: int, chunk: Chunk) -> None:
        self._sampled[place].take(chunk)

    def events(self, place: int) -> list[Event]:
        """Each event holds everything so far, or what is new. Of the former there are the fewer the longer a reply is: else the bytes of a
        stream would grow with the square of its length."""
        sampled, reported = self._sampled[place], self._reported[place]
        if not (self._body.incremental_streaming_output or sampled.finish is not None or _is_due(len(sampled.tokens), reported.tokens)):
            return []
        first = reported if self._body.incremental_streaming_output else NOTHING
        self._reported[place] = _Reported(len(sampled.tokens), len(sampled.text.certain))
        index = {"index": place} if self._batched else {}
        return [{**self._output(place, first), **index}]

    def closing(self) -> list[Event]:
        return []

    def whole(self) -> JSON:
        outputs = [self._output(place, NOTHING) for place in range(len(self._sampled))]
        return outputs if self._batched else outputs[0]

    def _output(self, place: int, reported: _Reported) -> Event:
        """Event with the tokens sampled after those already sent."""
        sampled = self._sampled[place]
        version = sampled.versions[-1] if sampled.versions else self._service.engine.version
        meta: dict[str, JSON] = {
            "id": sampled.request.id,
            "finish_reason": self._finish_reason(sampled),
            "prompt_tokens": len(sampled.request.tokens),
            "completion_tokens": len(sampled.tokens),
            "cached_tokens": sampled.num_cached,
            "weight_version": self._service.control.label(version),
            "e2e_latency": time.monotonic() - self._began,
        }
        if self._body.return_sampling_mask and sampled.request.sampling.narrows:
            meta |= self._mask(sampled, reported.tokens)
        if self._body.return_routed_experts and sampled.finish is not None and sampled.tokens:
            rows = Routes.join(sampled.routes).numpy().astype("<i4") - 1
            meta["routed_experts"] = b64encode(rows.tobytes()).decode()
        if self._body.return_logprob:
            meta |= self._logprobs(place, sampled, reported.tokens)
        return {"text": sampled.text.certain[reported.characters :], "output_ids": sampled.tokens[reported.tokens :], "meta_info": meta}

    def _mask(self, sampled: Sampled, first: int) -> dict[str, JSON]:
        """The ids that each token was drawn from, and its log-prob among them.

        Raises:
            ApiError: a token has more of them than SGLang tells, too.
        """
        if (most := max(map(len, sampled.kept[first:]), default=0)) > MAX_KEPT:
            text = f"a token was drawn from {most} ids, and at most {MAX_KEPT} are reported: set top_k"
            raise ApiError(400, text, param="return_sampling_mask")
        return {
            "output_token_sampling_mask": sampled.kept[first:],
            "output_token_sampling_logprobs": sampled.logprobs[first:],
            "output_token_sampling_mask_length": len(sampled.kept) - first,
        }

    def _finish_reason(self, sampled: Sampled) -> Event | None:
        match sampled.finish:
            case None:
                return None
            case Finish.LENGTH:
                return {"type": "length", "length": len(sampled.tokens)}
            case Finish.ABORT:
                return {"type": "abort", "message": self.call.abort_reason or "the engine was asked to stop"}
            case Finish.STOP:
                return {"type": "stop", "matched": self._matched(sampled)}

    def _matched(self, sampled: Sampled) -> int | str | None:
        """The stop that ended it: a stop token, else the first stop text."""
        if sampled.matched_token is not None:
            return sampled.matched_token
        text = self._service.renderer.decode(sampled.tokens)
        return min((stop for stop in sampled.request.sampling.stop if stop in text), key=text.find, default=None)

    def _logprobs(self, place: int, sampled: Sampled, first: int) -> dict[str, JSON]:
        """[log-prob, token id, text or null] of each token from the place `first` on, under the distribution that it was sampled from, at
        temperature 0 under the model's own; and the version that sampled it."""
        chosen = sampled.logprobs if sampled.request.sampling.temperature > 0 else sampled.raw_logprobs
        out: dict[str, JSON] = {
            "output_token_logprobs": [self._entry(*pair) for pair in zip(chosen[first:], sampled.tokens[first:], strict=True)],
            "output_token_weight_versions": [self._service.control.label(version) for version in sampled.versions[first:]],
        }
        if self._body.top_logprobs_num:
            out["output_top_logprobs"] = [[self._entry(logprob, token) for token, logprob in top] for top in sampled.top_logprobs[first:]]
        if self.call.score and place in self.call.scores and not first:  # in increments once
            out |= self._prompt_logprobs(self.call.scores[place], sampled.request.tokens)
        return out

    def _prompt_logprobs(self, scored: Scored, tokens: Sequence[int]) -> dict[str, JSON]:
        """From `logprob_start_len` on; the first of them has none, as in SGLang."""
        first = self._body.logprob_start_len
        logprobs = [None, *scored.logprobs[first:]]
        out: dict[str, JSON] = {"input_token_logprobs": [self._entry(*pair) for pair in zip(logprobs, tokens[first:], strict=True)]}
        if self._body.top_logprobs_num:
            tops = [[self._entry(logprob, token) for token, logprob in top] for top in scored.top_logprobs[first:]]
            out["input_top_logprobs"] = [None, *tops]
        return out

    def _entry(self, logprob: float | None, token: int) -> list[JSON]:
        return [logprob, token, self._service.renderer.decode([token]) if self._body.return_text_in_logprobs else None]
