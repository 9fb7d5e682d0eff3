"""vLLM's routes. New weights come by its four phases through the weight-transfer engine of the package `whet-vllm`, or from a folder."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from dataclasses import asdict
from typing import Any, Literal, cast

from whet.engine.base import EngineFailed, EngineLost, EngineRefused, PrefixUse
from whet.engine.servers.http import HttpServer
from whet.engine.servers.wire import SampledTokens, Served, sticky
from whet.engine.vllm.wire import body_of, sampled_of, score_body, scored_of
from whet.observe.exposition import parse
from whet.transport.base import AdapterTicket, BroadcastTicket, DiskTicket, Ticket
from whet.types import Request, Scored
from whet.types.columns import Ints

GENERATE = "/inference/v1/generate"
PREFIX_COUNTS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
"""Counters of `/metrics`: tokens of prompts that were in the cache, and tokens of all prompts."""
ACTIVE = "a weight update is already active"
"""vLLM's words where an earlier update was not finished."""
TORN = "whet-torn"
"""Label of weights that an update left in the middle."""
ADAPTER = "whet-adapter"
"""The adapter's name at servers: requests name it as their model."""
LOAD_ADAPTER = "/v1/load_lora_adapter"
PREFIX = "generate-tokens-"
"""vLLM puts it before a request's id. An abort of the bare id is answered as done, and aborts nothing."""


class VllmWire:
    """The `Wire` of a vLLM server.

    Args:
        server: its address.
        served: facts of it.
        model: name of the model in requests.
        has_plugin: it was started with the weight-transfer engine of `whet-vllm`.
        direct_names: names of the model's weights, if files call and cut them as the model does, so that digests of what arrived can be
            compared; None: they do not.
    """

    kind = "vLLM"

    def __init__(
        self, server: HttpServer, served: Served, model: str, *, has_plugin: bool, direct_names: frozenset[str] | None = None
    ) -> None:
        self.served = served
        self._server, self._model, self._has_plugin, self._direct_names = server, model, has_plugin, direct_names
        self._joined = False

    def through(self, router: HttpServer) -> VllmWire:
        """As `Wire.through`."""
        other = copy(self)
        other._server = router
        return other

    async def stream(self, request: Request, request_id: str, label: str) -> AsyncGenerator[SampledTokens, None]:
        body = body_of(request, request_id, self._model, f"whet-{label}")
        num_sampled = 0
        async with aclosing(self._server.events(GENERATE, body, sticky(request))) as events:
            async for event in events:
                sampled = sampled_of(event, request, num_sampled)
                num_sampled += len(sampled.tokens)
                yield sampled

    async def abort(self, request_id: str) -> None:
        await self._server.post("/inference/v1/abort_requests", {"request_ids": [PREFIX + request_id]})

    async def score(self, tokens: Ints, top_logprobs: int, request_id: str) -> Scored:
        answer = await self._server.post(GENERATE, score_body(tokens, self._model, request_id, top_logprobs))
        return scored_of(answer, tokens, top_logprobs, self._server.name)

    async def pause(self) -> None:
        await self._server.post("/pause?mode=abort&clear_cache=false")

    async def resume(self) -> None:
        await self._server.post("/resume")

    async def flush(self) -> bool:
        return (await self._server.post("/reset_prefix_cache?reset_running_requests=true") or {}).get("success", True)

    async def sleep(self) -> None:
        level = 1 if self.served.takes_adapters else 2  # 2 forgets the weights, and no update brings those below an adapter
        await self._server.post(f"/sleep?level={level}&mode=abort")

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        await self._server.post(f"/wake_up?tags={what}")

    async def held(self) -> dict[str, str] | None:
        try:
            return dict((await self._server.post("/weight_checker", {"action": "checksum"}))["checksums"])
        except EngineRefused:  # a server without this route
            return None

    async def checksums(self) -> None:
        """None: `held` has digests that the trainer can compute."""

    async def label(self) -> str:
        return (await self._server.get("/weight_info"))["weight_version"]

    async def prefix_use(self) -> PrefixUse:
        """As `Wire.prefix_use`, of the requests of all of its clients."""
        try:
            samples = [sample for family in parse(await self._server.metrics_text()) for sample in family.samples]
            return PrefixUse(*(sum(int(sample.value) for sample in samples if sample.name == name) for name in PREFIX_COUNTS))
        except EngineLost:
            raise
        except (EngineFailed, EngineRefused, ValueError):  # a server without this route, or with a broken one, samples as well
            return PrefixUse()

    async def health(self) -> None:
        await self._server.get("/health")

    async def load(self, ticket: Ticket, version: int) -> dict[str, str] | None:
        """As `Wire.load`. Without the plugin a server takes a folder alone, and tells no digests."""
        name = self._server.name
        match ticket:
            case AdapterTicket():
                body = {"lora_name": ADAPTER, "lora_path": str(ticket.folder), "load_inplace": True}
                await self._server.post_text(LOAD_ADAPTER, body)
                await self._server.post("/update_weight_version", {"new_version": str(version)})
                return None
            case DiskTicket() if not self._has_plugin:
                await self._server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(ticket.folder)}})
                await self._server.post("/update_weight_version", {"new_version": str(version)})
                return None
            case DiskTicket():
                info = {"version": version, "folder": str(ticket.folder)}
            case BroadcastTicket() if not self._has_plugin:
                raise ValueError(f"{name} was started without whet-vllm: install it there, or set sync.transport=disk")
            case BroadcastTicket() if self._direct_names is None:
                raise ValueError("files cut the weights of this model otherwise than the trainer does: set sync.transport=disk")
            case BroadcastTicket():
                info = asdict(ticket)
            case _:
                raise ValueError("a vLLM server takes weights over by sync.transport=disk or broadcast")
        if not self._joined:
            await self._server.post("/init_weight_transfer_engine", {"init_info": {"receivers": list(self.served.receivers)}})
            self._joined = True
        await self._start_update()
        await self._server.post("/update_weights", {"update_info": info})
        await self._server.post("/finish_weight_update", {"weight_version": str(version)})
        answer = await self._server.post("/collective_rpc", {"method": "whet_digests"})
        found = same_digests(name, answer, len(self.served.receivers))
        return None if self._direct_names is None else {each: digest for each, digest in found.items() if each in self._direct_names}

    async def _start_update(self) -> None:
        """Begin an update, and end one before that failed in the middle: what it left is overwritten, and proven to be."""
        try:
            await self._server.post("/start_weight_update")
        except EngineFailed as error:
            if ACTIVE not in str(error):
                raise
            await self._server.post("/finish_weight_update", {"weight_version": TORN})
            await self._server.post("/start_weight_update")


def same_digests(name: str, answer: Any, world_size: int) -> dict[str, str]:
    """The digests that all processes of a server tell.

    Raises:
        EngineFailed: if they do not tell the same.
    """
    results = cast("list[dict[str, str]]", answer["results"]) if isinstance(answer, dict) else []
    if len(results) != world_size or any(each != results[0] for each in results):
        raise EngineFailed(f"{name}: its {world_size} processes received other weights than each other, or {len(results)} of them answered")
    return results[0]
