"""Servers behind somebody's router as one engine: the router chooses who samples, and everything else goes to each server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from whet.engine.base import EngineFailed, PrefixUse, nats_apart
from whet.engine.checksums import check_agreement
from whet.engine.embedded.stops import Decode
from whet.engine.servers.http import KEY, HttpServer
from whet.engine.servers.member import ServerMember
from whet.engine.servers.start import ServerKind, await_answer
from whet.engine.servers.wire import SampledTokens, Served, Wire
from whet.transport.base import Ticket
from whet.types import Request, Scored
from whet.types.columns import Ints

T = TypeVar("T")


class Router(HttpServer):
    """A router's address, which is cut off together with the servers behind it."""

    def __init__(self, name: str, url: str, key: str | None, behind: Sequence[HttpServer]) -> None:
        super().__init__(name, url, key)
        self.behind = tuple(behind)

    def cut(self, why: str) -> None:
        super().cut(why)
        for server in self.behind:
            server.cut(why)


class RouterWire:
    """The `Wire` of servers behind a router.

    Args:
        router: its address.
        servers: the wire of each server behind it, by the server's name. Each is reached directly, too.
        tolerance: largest difference in nats between servers' scores of the same tokens.
    """

    def __init__(self, router: HttpServer, servers: Mapping[str, Wire], tolerance: float) -> None:
        first, *_ = every = list(servers.values())
        self._servers, self._tolerance, self._router = servers, tolerance, first.through(router)
        self.kind = f"{first.kind} behind a router"
        receivers = tuple(name for wire in every for name in wire.served.receivers)
        (dtype, *others) = {wire.served.dtype for wire in every}
        longest, takes_adapters = min(wire.served.max_tokens for wire in every), first.served.takes_adapters
        self.served = Served(longest, receivers, first.served.label, None if others else dtype, takes_adapters)

    def through(self, router: HttpServer) -> Wire:
        return self._router.through(router)

    def stream(self, request: Request, request_id: str, label: str) -> AsyncGenerator[SampledTokens, None]:
        return self._router.stream(request, request_id, label)

    async def abort(self, request_id: str) -> None:
        await self._each({name: wire.abort(request_id) for name, wire in self._servers.items()})

    async def score(self, tokens: Ints, top_logprobs: int, request_id: str) -> Scored:
        """As `Wire.score`, by every server.

        Raises:
            EngineFailed: if they disagree.
        """
        found = await self._each({name: wire.score(tokens, top_logprobs, request_id) for name, wire in self._servers.items()})
        (first, expected), *others = found.items()
        for name, scored in others:
            if not (worst := nats_apart(scored, expected)) <= self._tolerance:
                raise EngineFailed(f"{name} scores the same tokens {worst:.3g} nats away from {first}")
        return replace(expected, members=tuple(found.values()))

    async def pause(self) -> None:
        await self._each({name: wire.pause() for name, wire in self._servers.items()})

    async def resume(self) -> None:
        await self._each({name: wire.resume() for name, wire in self._servers.items()})

    async def flush(self) -> bool:
        return all((await self._each({name: wire.flush() for name, wire in self._servers.items()})).values())

    async def sleep(self) -> None:
        await self._each({name: wire.sleep() for name, wire in self._servers.items()})

    async def wake(self, what: Literal["weights", "kv_cache"]) -> None:
        await self._each({name: wire.wake(what) for name, wire in self._servers.items()})

    async def load(self, ticket: Ticket, version: int) -> dict[str, str] | None:
        """As `Wire.load`, by every server at once: a broadcast waits for all."""
        calls = {name: wire.load(ticket, version) for name, wire in self._servers.items()}
        return _same(await self._each(calls), "received other weights than")

    async def held(self) -> dict[str, str] | None:
        return _same(await self._each({name: wire.held() for name, wire in self._servers.items()}), "holds other weights than")

    async def checksums(self) -> dict[str, str] | None:
        """As `Wire.checksums`, of the first server: servers of one layout agree.

        Raises:
            EngineFailed: if they do not.
        """
        found = await self._each({name: wire.checksums() for name, wire in self._servers.items()})
        check_agreement({name: each for name, each in found.items() if each is not None})
        return next(iter(found.values()))

    async def label(self) -> str:
        return _same(await self._each({name: wire.label() for name, wire in self._servers.items()}), "has another version than")

    async def prefix_use(self) -> PrefixUse:
        """As `Wire.prefix_use`, of all servers together."""
        found = await self._each({name: wire.prefix_use() for name, wire in self._servers.items()})
        return sum(found.values(), PrefixUse())

    async def health(self) -> None:
        await self._each({name: wire.health() for name, wire in self._servers.items()})

    async def _each(self, calls: Mapping[str, Awaitable[T]]) -> dict[str, T]:
        """Answers of all servers, by name. When one fails the others are waited for, and its error is raised."""
        found = await asyncio.gather(*calls.values(), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return {name: each for name, each in zip(calls, found, strict=True) if not isinstance(each, BaseException)}


def _same(found: Mapping[str, T], words: str) -> T:
    """The answer of all servers.

    Raises:
        EngineFailed: if one answered otherwise than the first.
    """
    (first, expected), *others = found.items()
    for name, each in others:
        if each != expected:
            raise EngineFailed(f"{name} {words} {first}, and both are behind one router")
    return expected


@dataclass(frozen=True, slots=True)
class ServersBehindRouter:
    """Connects to servers behind a router, again and again. Its `__call__` may run in any thread."""

    kind: ServerKind
    name: str
    url: str
    """The router's."""
    servers: Mapping[str, str]
    """Addresses of the servers behind it, by name."""
    decode: Decode
    direct_names: frozenset[str] | None
    """As in `ServerKind.connect`."""
    tolerance: float
    """As in `RouterWire`."""
    timeout_s: float

    def __call__(self, given_up: threading.Event) -> ServerMember:
        key = os.environ.get(KEY)
        for name, url in {**self.servers, self.name: self.url}.items():
            await_answer(name, url, "engine.router" if name == self.name else "engine.urls", self.timeout_s, given_up)
        servers = {name: HttpServer(name, url, key) for name, url in self.servers.items()}
        router = Router(self.name, self.url, key, list(servers.values()))
        wires = {name: self.kind.connect(server, key, self.direct_names) for name, server in servers.items()}
        return ServerMember(router, RouterWire(router, wires, self.tolerance), self.decode)
