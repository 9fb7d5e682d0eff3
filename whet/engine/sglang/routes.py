"""SGLang's routes. New weights come from a folder, or by a broadcast."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from typing import Literal

from whet.engine.base import EngineFailed, EngineLost, EngineRefused, PrefixUse
from whet.engine.servers.http import HttpServer
from whet.engine.servers.wire import SampledTokens, Served, sticky
from whet.engine.sglang.broadcast import BroadcastClient, check_success
from whet.engine.sglang.checksums import checksums_of
from whet.engine.sglang.wire import ReplyStream, body_of, score_body, scored_of
from whet.transport.base import DiskTicket, ServerBroadcastTicket, Ticket
from whet.types import Request, Scored
from whet.types.columns import Ints

GENERATE = "/generate"


class SglangWire:
    """The `Wire` of an SGLang server, or of `whet serve`.

    Args:
        server: its address.
        served: facts of it.
        no_broadcast: why a broadcast cannot reach its processes; "": it can.
    """

    kind = "SGLang"

    def __init__(self, server: HttpServer, served: Served, no_broadcast: str = "") -> None:
        self.served, self._server, self._no_broadcast = served, server, no_broadcast
        self._broadcast = BroadcastClient(server, served.receivers)
        self._tells_checksums = True
        self._use = [PrefixUse()]
        """Use by whet's requests; one place for this wire and the one through a router."""

    def through(self, router: HttpServer) -> SglangWire:
        """As `Wire.through`."""
        other = copy(self)
        other._server = router
        return other

    async def stream(self, request: Request, request_id: str, label: str) -> AsyncGenerator[SampledTokens, None]:
        reply = ReplyStream(request)
        async with aclosing(self._server.events(GENERATE, body_of(request, request_id), sticky(request))) as events:
            async for event in events:
                sampled = reply.sampled(event)
                if sampled.finish is not None:
                    self._use[0] += PrefixUse(reply.num_cached, len(request.tokens))
                yield sampled

    async def abort(self, request_id: str) -> None:
        await self._server.post_text("/abort_request", {"rid": request_id})

    async def score(self, tokens: Ints, top_logprobs: int, request_id: str) -> Scored:
        answer = await self._server.post(GENERATE, score_body(tokens, request_id, top_logprobs))
        return scored_of(answer, tokens, top_logprobs, self._server.name)

    async def pause(self) -> None:
        await self._server.post("/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        await self._server.post("/continue_generation", {})  # without a body it answers 400

    async def flush(self) -> bool:
        try:
            await self._server.post_text("/flush_cache", {})
        except EngineRefused:  # 400: something runs still
            return False
        return True

    async def sleep(self) -> None:
        await self._server.post_text("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        await self._server.post_text("/resume_memory_occupation", {"tags": [what]})

    async def held(self) -> None:
        """None: its `/weights_checker` has a hash of its own, which `checksums` has."""

    async def checksums(self) -> dict[str, str] | None:
        """As `Wire.checksums`. A server that tells none is asked once, and named."""
        if not self._tells_checksums:
            return None
        try:
            return checksums_of(self._server.name, await self._server.post("/weights_checker", {"action": "checksum"}))
        except EngineLost:
            raise
        except (EngineFailed, EngineRefused) as error:
            self._tells_checksums = False
            warnings.warn(f"{error}; its weights are proven by the log-probs of a fixed prompt alone", stacklevel=1)
            return None

    async def label(self) -> str:
        return str((await self._server.get("/model_info"))["weight_version"])

    async def prefix_use(self) -> PrefixUse:
        """As `Wire.prefix_use`, of whet's own requests: its `/metrics` is a switch of the server's."""
        return self._use[0]

    async def health(self) -> None:
        await self._server.get("/health")

    async def load(self, ticket: Ticket, version: int) -> None:
        """As `Wire.load`. `abort_all_requests` is false: what runs was ended by the pause."""
        match ticket:
            case DiskTicket():
                body = {"model_path": str(ticket.folder), "weight_version": str(version), "abort_all_requests": False, "flush_cache": True}
                path = "/update_weights_from_disk"
                check_success(self._server.name, path, await self._server.post(path, body))
            case ServerBroadcastTicket() if self._no_broadcast:
                raise ValueError(f"{self._server.name}: {self._no_broadcast}: set sync.transport=disk")
            case ServerBroadcastTicket():
                await self._broadcast.load(ticket, version)
            case _:
                raise ValueError("an SGLang server takes weights over by sync.transport=disk or broadcast")
