"""The wire of vLLM's `/inference/v1/generate`: a request as its JSON, its events as tokens. vLLM 0.32 and 0.33."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.servers.routing import check_routed, first_row, routes_of, vllm_rows
from whet.engine.servers.wire import SampledTokens, check_raw, restarts
from whet.types import Grammar, Request, Scored
from whet.types.columns import Doubles, Ints
from whet.types.routes import Routes

IMPOSSIBLE = -9999.0
"""vLLM's JSON has it in place of minus infinity."""
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "lark": "grammar"}
"""Names of whet's grammars among vLLM's structured outputs."""


def body_of(request: Request, request_id: str, model: str, salt: str) -> dict[str, Any]:
    """The JSON of a request.

    Args:
        request: the request; its stop texts are the caller's to find. Its seed stays here: vLLM samples requests with seeds one by one,
            and its build for CPUs ends when it computes such a prompt in parts.
        request_id: its id at the server.
        model: the model's name there.
        salt: keeps the prefix cache of one version apart from that of others.

    Raises:
        EngineRefused: if vLLM cannot run it as asked.
    """
    sampling = request.sampling
    if request.num_begun and restarts(sampling):
        raise EngineRefused(
            f"request {request.id}: vLLM cannot continue a reply under a grammar, presence_penalty or frequency_penalty: it would count "
            "the reply's first tokens as prompt; leave these options out, or use engine.name=embedded"
        )
    check_raw(request, "with --logprobs-mode processed_logprobs vLLM")
    check_routed(request, "vLLM")
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_tokens": max(0, sampling.min_tokens - request.num_begun),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are those of the request, whatever the model's files say
        "logprobs": sampling.top_logprobs,
        "detokenize": False,
    }
    if sampling.routes:
        params["routed_experts_prompt_start"] = first_row(request)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.grammar is not None:
        params["structured_outputs"] = structured(sampling.grammar)
    return {
        "request_id": request_id,
        "model": model,
        "token_ids": list(request.tokens),
        "sampling_params": params,
        "stream": True,
        "cache_salt": salt,
    }


def structured(grammar: Grammar) -> dict[str, Any]:
    return {GRAMMARS[grammar.kind]: grammar.text}


def sampled_of(event: Mapping[str, Any], request: Request, num_before: int = 0) -> SampledTokens:
    """The tokens of an event, and what was asked for of each; `num_before`: tokens of earlier events.

    Raises:
        EngineFailed: if something that was asked for is missing: a router or a flag of the server has dropped it.
    """
    try:
        (choice,) = event["choices"]
        tokens = list(map(int, choice.get("token_ids") or ()))
        entries = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in entries]
        spans = choice.get("weight_versions")
        finish = choice.get("finish_reason")
        mask = choice.get("sampling_mask")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineFailed(f"request {request.id}: an event is not as vLLM's: {error!r}: {str(event)[:300]}") from error
    if len(logprobs) != len(tokens):
        raise EngineFailed(f"request {request.id}: {len(tokens)} tokens came with {len(logprobs)} log-probs; nothing of it is used")
    if tokens and min(logprobs) <= IMPOSSIBLE:
        raise EngineFailed(
            f"request {request.id}: a sampled token has the log-prob {min(logprobs):g} (minus infinity): the server's log-probs are not "
            "those of its samples; start it with --logprobs-mode processed_logprobs"
        )
    if request.sampling.nucleus and request.sampling.narrows and len(mask or ()) != len(tokens):
        raise EngineFailed(
            f"request {request.id}: with top_p, top_k or min_p the ids that each token was drawn from are needed, and the server sends "
            "none: start it with --return-sampling-mask (it needs model runner V2, and a GPU), or sample with top_p=1, top_k=0, min_p=0"
        )
    if request.sampling.temperature == 0:
        logprobs = [0.0] * len(tokens)  # of a distribution with one point
    top = [_top(entry, request.sampling.top_logprobs) for entry in entries] if request.sampling.top_logprobs else []
    labels = None if spans is None else [str(span["version"]) for span in spans]
    routes = _routes(choice.get("routed_experts"), request, finish, num_before + len(tokens)) if request.sampling.routes else None
    return SampledTokens(tokens, logprobs, top, [list(each) for each in mask or ()], finish, labels, routes)


def _routes(encoded: str | None, request: Request, finish: str | None, num_sampled: int) -> Routes | None:
    """The experts that come with the end of a reply; None: it has not ended, or was aborted without them.

    Raises:
        EngineFailed: if they are missing, or of other tokens.
    """
    if encoded is None and finish in (None, "abort"):
        return None
    if encoded is None:
        raise EngineFailed(
            f"request {request.id}: train.routing_replay=rollout needs the experts that tokens went to, and the server sends none: start "
            "it with --enable-return-routed-experts"
        )
    try:
        rows = vllm_rows(encoded)
    except (ValueError, TypeError) as error:
        raise EngineFailed(f"request {request.id}: routed_experts are not as vLLM's: {error}") from error
    return routes_of(request, rows, num_sampled)


def _top(entry: Mapping[str, Any], count: int) -> tuple[tuple[int, float], ...]:
    found = sorted(((int(each["token_id"]), float(each["logprob"])) for each in entry["top_logprobs"]), key=lambda each: -each[1])
    return tuple(found[:count])


def score_body(tokens: Ints, model: str, request_id: str, top_logprobs: int) -> dict[str, Any]:
    """The JSON of a score: one token is sampled, for vLLM has no request without."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_logprobs, "detokenize": False}
    return {"request_id": request_id, "model": model, "token_ids": list(tokens), "sampling_params": params}


def scored_of(answer: Mapping[str, Any], tokens: Ints, top_logprobs: int, name: str) -> Scored:
    """The log-probs of an answer to `score_body`.

    Raises:
        EngineFailed: if they are not there.
    """
    found = answer.get("prompt_logprobs")
    if not isinstance(found, list) or len(found) != len(tokens):
        raise EngineFailed(f"{name} answered a score of {len(tokens)} tokens without their log-probs")
    try:
        places = [(str(token), place) for token, place in zip(list(tokens)[1:], found[1:], strict=True)]
        logprobs = [float(place[token]["logprob"]) for token, place in places]
        top = tuple(_most_likely(place, top_logprobs) for _, place in places) if top_logprobs else ()
    except (KeyError, TypeError) as error:
        raise EngineFailed(f"{name} answered a score without the log-prob of a token: {error}") from error
    return Scored(Doubles(logprobs), top)


def _most_likely(place: Mapping[str, Mapping[str, Any]], count: int) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(((int(token), float(each["logprob"])) for token, each in place.items()), key=lambda each: -each[1])[:count])
