"""An SGLang server's part in a broadcast of weights: SGLang's routes are called as the trainer announces what it sends.

`/init_weights_update_group`, then for each version `/begin_weight_update`, `/update_weights_from_distributed` for each bucket,
`/end_weight_update` and `/update_weight_version`. No call aborts a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from whet.engine.base import EngineFailed, EngineLost, EngineRefused
from whet.engine.servers.http import HttpServer
from whet.transport.announcements import BucketLayout, Listener
from whet.transport.base import ServerBroadcastTicket, TransportError
from whet.transport.server_broadcast import GROUP

OFF_S = 2.0
"""For a broadcast to be called off after a server failed in it: the failure of another may be the cause."""
LAST_CALL_S = 5.0
"""For a server to answer once its broadcast was called off."""
LEAVE_S = 10.0
"""For a server to leave a broadcast that failed."""


class BroadcastClient:
    """Takes part in broadcasts for a server.

    Args:
        server: its address.
        receivers: names of its processes, in the order of their ranks.
    """

    def __init__(self, server: HttpServer, receivers: Sequence[str]) -> None:
        self._server, self._receivers = server, list(receivers)
        self._group = ""
        """The group that its processes are in, by the port where it met."""
        self._open = self._failed = False
        """An update may be open there; the last one failed."""

    async def load(self, ticket: ServerBroadcastTicket, version: int) -> None:
        """Have the server take a version over, under the label `str(version)`.

        Raises:
            EngineFailed: if the server fails: it holds parts of two versions.
            TransportError: if the broadcast is called off, for another's sake: it may hold parts of two versions, too.
        """
        if self._failed:
            await self._leave()
        try:
            listener = await asyncio.to_thread(Listener, ticket, self._receivers)
            try:
                await self._load(listener, ticket, version)
            except (EngineFailed, EngineRefused) as error:
                if isinstance(error, EngineLost) or not await listener.off(OFF_S):
                    raise
                raise TransportError(f"the broadcast was called off: {error}") from error
        except BaseException as error:  # raised again; a call that is cancelled leaves the server in the middle, too
            self._failed = True
            if isinstance(error, Exception) and not isinstance(error, EngineLost):
                await self._leave(error)
            if isinstance(error, ConnectionError):
                raise TransportError(f"the broadcast broke off: {error}") from error
            raise

    async def _load(self, listener: Listener, ticket: ServerBroadcastTicket, version: int) -> None:
        await self._join(listener, ticket)
        self._open = True
        await self._call(listener, "/begin_weight_update", {})
        listener.ready()
        async for bucket in listener.buckets():
            await self._call(listener, "/update_weights_from_distributed", bucket_body(bucket))
        await self._call(listener, "/end_weight_update", {})
        self._open = False
        await self._call(listener, "/update_weight_version", version_body(version))
        listener.done()

    async def _join(self, listener: Listener, ticket: ServerBroadcastTicket) -> None:
        """Have the server's processes in the group: an earlier one of that name is destroyed, also where another run left it."""
        group = await listener.come(self._group)
        if group == self._group:
            return
        with suppress(EngineRefused):  # there is none
            await self._answer(listener, "/destroy_weights_update_group", {"group_name": GROUP})
        self._group = group
        await self._call(listener, "/init_weights_update_group", group_body(ticket, int(group), self._receivers))

    async def _call(self, listener: Listener, path: str, body: dict[str, Any]) -> None:
        """Call a route.

        Raises:
            EngineFailed: if it fails, in whatever way it says so.
        """
        check_success(self._server.name, path, await self._answer(listener, path, body))

    async def _answer(self, listener: Listener, path: str, body: dict[str, Any]) -> Any:
        """A route's answer.

        Raises:
            EngineLost: if it does not come soon after the broadcast was called off: nobody knows what the server does.
        """
        answering = asyncio.ensure_future(self._server.post(path, body))
        watching = asyncio.ensure_future(listener.off())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                await asyncio.wait({answering}, timeout=min(LAST_CALL_S, listener.timeout_s / 4))
            if not answering.done():
                raise EngineLost(f"{self._server.name}: {path} did not answer, and the broadcast was called off")
            return answering.result()
        finally:
            answering.cancel()
            watching.cancel()
            await asyncio.wait({answering, watching})

    async def _leave(self, why: Exception | None = None) -> None:
        """Have the server leave a broadcast that failed, so that the others' group ends, and end its update.

        Args:
            why: the failure, if it is the present broadcast's.

        Raises:
            EngineLost: if it does not: it cannot take part in another.
        """
        calls = [("/destroy_weights_update_group", {"group_name": GROUP})] if self._group else []
        calls += [("/end_weight_update", {})] if self._open else []
        try:
            async with asyncio.timeout(LEAVE_S):
                for path, body in calls:
                    with suppress(EngineRefused):  # the group was never made, or the update lacks weights
                        await self._server.post(path, body)
        except (EngineFailed, TimeoutError) as error:
            words = f"{self._server.name} cannot leave a broadcast that failed: {error or type(error).__name__}"
            raise EngineLost(words if why is None else f"{why}; and {words}") from error
        self._group, self._open, self._failed = "", False, False


def group_body(ticket: ServerBroadcastTicket, port: int, receivers: Sequence[str]) -> dict[str, Any]:
    """The JSON of `/init_weights_update_group`: the trainer is rank 0, and the server's processes have neighbouring ranks."""
    return {
        "master_address": ticket.host,
        "master_port": port,
        "rank_offset": 1 + ticket.receivers.index(receivers[0]),
        "world_size": 1 + len(ticket.receivers),
        "group_name": GROUP,
        "backend": ticket.backend,
    }


def bucket_body(bucket: BucketLayout) -> dict[str, Any]:
    """The JSON of `/update_weights_from_distributed`. Caches are emptied after the last bucket, by a call of its own."""
    return {**asdict(bucket), "group_name": GROUP, "flush_cache": False, "abort_all_requests": False}


def version_body(version: int) -> dict[str, Any]:
    """The JSON of `/update_weight_version`, which aborts all requests by default."""
    return {"new_version": str(version), "abort_all_requests": False}


def check_success(name: str, path: str, answer: Any) -> None:
    """Check the answer of a route of weights.

    Raises:
        EngineFailed: if it says that it failed, which it may do in an answer of status 200, or does not say that it did not.
    """
    if not isinstance(answer, dict) or answer.get("success") is not True:
        words = answer.get("message", answer) if isinstance(answer, dict) else answer
        raise EngineFailed(f"{name}: {path}: {words}")
