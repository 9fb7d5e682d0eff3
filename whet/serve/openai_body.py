"""Common fields of the bodies of OpenAI's two routes, with the extensions that vLLM and SGLang know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from whet.serve.bodies import Body
from whet.serve.bounds import Count, Name, Positive, Seed, check_alternatives, context_of
from whet.serve.sampling import SamplingBody, new_seed
from whet.serve.service import Service
from whet.types import Grammar, Request, SamplingParams


class StreamOptions(Body):
    """Content of a stream in addition to text."""

    include_usage: bool = False
    """A last event with token counts."""
    include_obfuscation: Literal[False] | None = None


class OpenAIBody(SamplingBody):
    """Fields of both routes. Those that say who asks, or how it is billed, change nothing."""

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None

    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: Literal[False] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def params_of(
    service: Service, body: OpenAIBody, max_tokens: int, top_logprobs: int | None, grammar: Grammar | None
) -> SamplingParams:
    """The engine's parameters. `top_logprobs` is None where no log-probs are wanted, or the number of alternatives to tell.

    Raises:
        ApiError: 400, naming the field that is out of range.
    """
    if top_logprobs is not None:
        check_alternatives(max(1, max_tokens) * (body.n or 1), top_logprobs, "top_logprobs")
    return body.params(
        service.renderer.stop_token_ids,
        {},
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        grammar=grammar,
        raw_logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs,
    )


def requests_of(service: Service, body: OpenAIBody, call_id: str, tokens: Sequence[int], sampling: SamplingParams) -> list[Request]:
    """One engine request for each of the n samples of a prompt, each with its own seed."""
    seed = new_seed() if body.seed is None else body.seed
    every = service.config.stream_interval if body.stream else 0
    context = context_of(tokens)
    return [Request(f"{call_id}-{i}", context, replace(sampling, seed=seed + i), chunk_tokens=every) for i in range(body.n or 1)]
