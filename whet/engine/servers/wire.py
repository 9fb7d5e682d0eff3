"""The wire between whet and a server of any kind: what a request asks for, what an event brings, and the calls behind a member."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from whet.engine.base import EngineRefused, PrefixUse
from whet.engine.servers.http import HttpServer
from whet.transport.base import Ticket
from whet.types import Request, SamplingParams, Scored
from whet.types.columns import Ints
from whet.types.routes import Routes

_MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one event."""

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[tuple[tuple[int, float], ...]]
    nuclei: list[list[int]]
    """For each token the ids that it was drawn from; empty: not asked for."""
    finish: str | None
    """The server's finish reason: stop, length, abort, or another."""
    labels: list[str] | None
    """Labels of the weights that sampled the reply, with its last event; None: the server does not tell."""
    routes: Routes | None = None
    """As in `Chunk`, of the whole attempt, with its last event. None: not asked for, or the attempt was aborted without them."""


@dataclass(frozen=True, slots=True)
class Served:
    """Facts that a server tells of itself."""

    max_tokens: int
    """Longest sequence."""
    receivers: tuple[str, ...]
    """Names of its processes that take weights over, in the order of their ranks."""
    label: str
    """Its label of the weights that it holds."""
    dtype: str | None = None
    """As in `Receipt`."""
    takes_adapters: bool = False
    """As in `Capabilities`."""


class Wire(Protocol):
    """The routes of one kind of server. All calls raise EngineLost, EngineFailed or EngineRefused as `HttpServer.post` does."""

    kind: str
    """The kind of server in messages: vLLM, SGLang."""
    served: Served

    def through(self, router: HttpServer) -> Wire:
        """The same server's routes, reached by a router's address."""
        ...

    def stream(self, request: Request, request_id: str, label: str) -> AsyncGenerator[SampledTokens, None]:
        """Have a request run under an id of the server's; `label`: of the weights, which caches are kept apart by."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets the finish reason `abort`."""
        ...

    async def score(self, tokens: Ints, top_logprobs: int, request_id: str) -> Scored:
        """Log-probs at temperature 1. The server is not paused."""
        ...

    async def pause(self) -> None:
        """Abort what runs, and begin nothing new."""
        ...

    async def resume(self) -> None: ...

    async def flush(self) -> bool:
        """Empty the prefix cache; False: some of it is in use still."""
        ...

    async def sleep(self) -> None:
        """Free the memory of weights and cache. The server is paused."""
        ...

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None: ...

    async def load(self, ticket: Ticket, version: int) -> dict[str, str] | None:
        """Take over the weights of a ticket under the label `str(version)`.

        Returns: digests of what arrived, by name, the same in all of its processes; None: it does not tell.
        """
        ...

    async def held(self) -> dict[str, str] | None:
        """SHA-256 of each parameter in the server's memory, as `Receipt.layout`; None: it does not tell."""
        ...

    async def checksums(self) -> dict[str, str] | None:
        """The server's own checksums of its parameters, as `Receipt.checksums`; None: it does not tell."""
        ...

    async def label(self) -> str:
        """The server's label of its weights."""
        ...

    async def prefix_use(self) -> PrefixUse:
        """Use of the server's prefix cache so far; zeros: it does not tell."""
        ...

    async def health(self) -> None:
        """Raises if the server does not answer."""
        ...


def sticky(request: Request) -> dict[str, str]:
    """Headers by which routers keep a conversation at one server: vLLM's router reads the first, SGLang's the second."""
    key = request.conversation or request.id
    return {"x-session-id": key, "x-smg-routing-key": key}


def restarts(sampling: SamplingParams) -> bool:
    """True if a reply cannot be continued from its tokens: the server takes them for a part of the prompt, and a grammar, or a penalty on
    what was sampled, would begin again."""
    return sampling.grammar is not None or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def seed_of(seed: int, num_begun: int) -> int:
    """Seed for the rest of a reply: other noise than at its beginning, which the server would draw again. Within 63 bits."""
    return (seed ^ (num_begun * _MIX)) & (2**63 - 1)


def check_raw(request: Request, why: str) -> None:
    """Refuse log-probs of the model's own distribution unless the server samples from it.

    Args:
        request: the request.
        why: the server has no others; the beginning of the message.
    """
    sampling = request.sampling
    if not (sampling.raw_logprobs or sampling.top_logprobs):
        return
    same = {"seed": 0, "stop": (), "stop_token_ids": (), "min_tokens": 0, "raw_logprobs": False, "top_logprobs": 0}
    same |= {"nucleus": False, "routes": False}
    if replace(sampling, max_tokens=1, **same) != SamplingParams(1):
        raise EngineRefused(
            f"request {request.id}: {why} has no log-probs of the model's own distribution but at "
            "temperature 1 without top_p, top_k, min_p, penalties, bias and grammar"
        )
