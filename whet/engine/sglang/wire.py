"""The wire of SGLang's `/generate`: a request as its JSON, its events as tokens. SGLang 0.5.23; `whet serve` speaks it, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.servers.routing import check_routed, first_row, routes_of, sglang_rows
from whet.engine.servers.wire import SampledTokens, check_raw, restarts, seed_of
from whet.types import Request, Scored
from whet.types.columns import Doubles, Ints
from whet.types.routes import Routes

GRAMMARS = {"json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf"}
"""Names of whet's grammars among SGLang's sampling parameters."""


def body_of(request: Request, request_id: str) -> dict[str, Any]:
    """The JSON of a request.

    Args:
        request: the request; its stop texts are the caller's to find.
        request_id: its id at the server.

    Raises:
        EngineRefused: if SGLang cannot run it as asked.
    """
    sampling = request.sampling
    if request.num_begun and restarts(sampling):
        raise EngineRefused(
            f"request {request.id}: SGLang cannot continue a reply under a grammar, presence_penalty or frequency_penalty: it would count "
            "the reply's first tokens as prompt; leave these options out, or use engine.name=embedded"
        )
    if sampling.repetition_penalty != 1.0:
        raise EngineRefused(f"request {request.id}: SGLang's repetition_penalty leaves out the prompt, and whet's does not: leave it out")
    check_raw(request, "SGLang")
    check_routed(request, "SGLang")
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": max(0, sampling.min_tokens - request.num_begun),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": seed_of(sampling.seed, request.num_begun),
        "stream_interval": max(1, request.chunk_tokens),
    }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.grammar is not None:
        if sampling.grammar.kind not in GRAMMARS:
            raise EngineRefused(f"request {request.id}: SGLang has no grammars of the kind {sampling.grammar.kind}")
        params[GRAMMARS[sampling.grammar.kind]] = sampling.grammar.text
    body = {
        "rid": request_id,
        "input_ids": list(request.tokens),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": sampling.top_logprobs,
        "stream": True,
    }
    if sampling.narrows:
        body["return_sampling_mask"] = True
    if sampling.routes:
        body |= {"return_routed_experts": True, "routed_experts_start_len": first_row(request)}
    return body


class ReplyStream:
    """Reads the events of a reply. Each holds all tokens so far, or what is new, as the server was started; its count of all tokens tells.

    Args:
        request: the request.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._count = self.num_cached = 0

    def sampled(self, event: Mapping[str, Any]) -> SampledTokens:
        """The tokens of an event that no earlier event had.

        Raises:
            EngineFailed: if something that was asked for is missing, or the server ended the reply with an error.
        """
        request, sampling = self._request, self._request.sampling
        try:
            meta = event["meta_info"]
            total, self.num_cached = int(meta["completion_tokens"]), int(meta.get("cached_tokens") or 0)
            tokens = [int(each) for each in self._new("output_ids", event["output_ids"], total)]
            entries = self._new("output_token_logprobs", meta.get("output_token_logprobs") or (), total)
            logprobs, named = [float(each[0]) for each in entries], [int(each[1]) for each in entries]
            top = self._new("output_top_logprobs", meta.get("output_top_logprobs") or (), total) if sampling.top_logprobs else []
            masks = self._new("output_token_sampling_mask", meta.get("output_token_sampling_mask") or (), total) if sampling.narrows else []
            if sampling.narrows:
                kept = meta.get("output_token_sampling_logprobs") or ()
                logprobs = [float(each) for each in self._new("output_token_sampling_logprobs", kept, total)]
            finish = self._finish(meta.get("finish_reason"))
            routes = self._routes(meta.get("routed_experts"), finish, total) if sampling.routes else None
            labels = [str(span["version"]) for span in meta.get("weight_versions") or ()] or [str(meta["weight_version"])]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineFailed(f"request {request.id}: an event is not as SGLang's: {error!r}: {str(event)[:300]}") from error
        if named != tokens:
            raise EngineFailed(f"request {request.id}: the log-probs are of other tokens than the reply; nothing of it is used")
        self._count = total
        if sampling.temperature == 0:
            logprobs = [0.0] * len(tokens)  # of a distribution with one point
        return SampledTokens(
            tokens,
            logprobs,
            [tuple((int(each[1]), float(each[0])) for each in place[: sampling.top_logprobs]) for place in top],
            [list(map(int, mask)) for mask in masks] if sampling.nucleus else [],
            finish,
            labels,
            routes,
        )

    def _routes(self, encoded: str | None, finish: str | None, total: int) -> Routes | None:
        """The experts that come with the end of a reply; None: it has not ended, or was aborted without them.

        Raises:
            EngineFailed: if they are missing, or of other tokens.
        """
        request = self._request
        if finish is None or (encoded is None and finish == "abort"):
            return None
        if encoded is None:
            raise EngineFailed(
                f"request {request.id}: train.routing_replay=rollout needs the experts that tokens went to, and none came: start the "
                "server with --enable-return-routed-experts; some routers lose `return_routed_experts`"
            )
        return routes_of(request, sglang_rows(encoded, len(request.tokens) + total - 1 - first_row(request)), total)

    def _new(self, name: str, values: Sequence[Any], total: int) -> list[Any]:
        """The values of new tokens.

        Raises:
            EngineFailed: if there are neither as many as new tokens nor as all.
        """
        new = total - self._count
        if new < 0 or len(values) not in (new, total):
            remedy = ""
            if name.startswith("output_token_sampling"):
                remedy = (
                    ": with top_p, top_k or min_p the ids that each token was drawn from are needed; SGLang 0.5.23 has them, and some "
                    "routers lose `return_sampling_mask`"
                )
            raise EngineFailed(f"request {self._request.id}: {new} new tokens of {total} came with {len(values)} of {name}{remedy}")
        return list(values[len(values) - new :])

    def _finish(self, reason: Mapping[str, Any] | None) -> str | None:
        """SGLang's finish reason: stop, length, abort. A reply that ended at a token which is no stop of the request goes on: `abort`."""
        if reason is None:
            return None
        if reason["type"] == "abort" and reason.get("status_code"):
            raise EngineFailed(f"request {self._request.id}: the server gave it up: {reason.get('message')}")
        if reason["type"] == "stop" and reason.get("matched") not in self._request.sampling.stop_token_ids:
            return "abort"
        return str(reason["type"])


def score_body(tokens: Ints, request_id: str, top_logprobs: int) -> dict[str, Any]:
    """The JSON of a score: no token is sampled."""
    return {
        "rid": request_id,
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top_logprobs,
    }


def scored_of(answer: Mapping[str, Any], tokens: Ints, top_logprobs: int, name: str) -> Scored:
    """The log-probs of an answer to `score_body`.

    Raises:
        EngineFailed: if they are not there.
    """
    try:
        found = answer["meta_info"]["input_token_logprobs"]
        if [int(each[1]) for each in found] != list(tokens):
            raise ValueError(f"log-probs of {len(found)} tokens, or of others")
        logprobs = Doubles([float(each[0]) for each in found[1:]])
        places = answer["meta_info"]["input_top_logprobs"][1:] if top_logprobs else ()
        top = tuple(tuple((int(each[1]), float(each[0])) for each in place[:top_logprobs]) for place in places)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineFailed(f"{name} answered a score of {len(tokens)} tokens without their log-probs: {error}") from error
    return Scored(logprobs, top)
