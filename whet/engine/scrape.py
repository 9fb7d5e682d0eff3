"""Source of a scrape of the run's metrics: the state of a pool's members, and the texts of its servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.pool.pool import EnginePool
from whet.engine.servers.http import HttpServer
from whet.engine.servers.member import ServerMember
from whet.observe.exposition import Family, gauge


class PoolSource:
    """The `EngineSource` of a pool. It takes nothing of the pool's loop: servers are asked over connections of the scrape's own.

    Args:
        pool: the run's engine.
    """

    def __init__(self, pool: EnginePool[Any]) -> None:
        self._pool = pool
        self._servers: dict[str, HttpServer] = {}
        """Servers by name, lost ones included."""

    def families(self) -> list[Family]:
        """The state of each member of the pool, and the number of requests that run there."""
        slots = list(self._pool.slots)
        up = {(("member", slot.name),): float(slot.up) for slot in slots}
        running = {(("member", slot.name),): float(len(slot.requests)) for slot in slots}
        return [
            gauge("whet_engine_member_up", "1 if the member of the engine serves", up),
            gauge("whet_engine_member_requests_running", "requests that run at the member of the engine", running),
        ]

    async def texts(self, timeout_s: float) -> Mapping[str, str | None]:
        """As `EngineSource.texts`."""
        for slot in list(self._pool.slots):
            if isinstance(slot.member, ServerMember):
                self._servers |= {server.name: server for server in slot.member.servers}
        answers = await asyncio.gather(*(_text_of(server, timeout_s) for server in self._servers.values()))
        return dict(zip(self._servers, answers, strict=True))


async def _text_of(server: HttpServer, timeout_s: float) -> str | None:
    """The text of a server's `/metrics`; "" where it has no such route, None where it does not answer in time."""
    try:
        return await asyncio.wait_for(server.metrics_text(), timeout_s)
    except EngineRefused:
        return ""
    except (EngineFailed, TimeoutError):
        return None
