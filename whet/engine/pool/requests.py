"""The requests of a pool: which member samples what, and where it goes on when a member is lost or fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic

from whet.engine.base import EngineFailed, EngineLost, StaleCache
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Incident, M, Slot
from whet.engine.pool.placement import choose, in_flight, leave, others, settle
from whet.engine.pool.reply import PooledReply
from whet.engine.pool.supervisor import Supervisor
from whet.types import Chunk, Request

MOST_KINDS = 50
"""Kinds of failures of a member that are reported at most: a server's words may differ each time."""
ABORTED_S = 1.0
"""For a member to hand over what it sampled of a request that is aborted. One that hangs is not waited for: what it had handed over is
there."""


class Requests(Generic[M]):
    """Requests in flight, and the open conversations.

    Args:
        supervisor: supervisor of the members.
        replies: to them, by their ids; filled here.
        config: deadlines.
        deterministic: a request that fails is not tried elsewhere.
    """

    def __init__(self, supervisor: Supervisor[M], replies: dict[str, PooledReply], config: PoolConfig, *, deterministic: bool) -> None:
        self._supervisor, self.replies, self._config, self._deterministic = supervisor, replies, config, deterministic
        self.num_retried = 0
        self._homes: dict[str, Slot[M] | None] = {}
        """Open conversations, each with the place that it stays with; None: it has had no request yet, and there was no place."""
        self._asking: set[asyncio.Task[list[None]]] = set()
        """Tasks that pass an abort on to members, and need not be awaited."""
        self._stale: set[str] = set()
        """Names of members reported as holding a stale cache."""
        self._kinds: dict[str, set[str]] = {}
        """Kinds of failed requests that were reported, by the member's name."""

    def open(self, conversation: str) -> None:
        slot = self._homes[conversation] = choose(self._supervisor.slots, self._homes.get(conversation))
        if slot is not None:  # else the member that gets its first request
            settle(conversation, slot)

    def release(self, conversation: str) -> None:
        home = self._homes.pop(conversation, None)
        if home is not None:
            leave(conversation, home)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """As `Engine.generate`."""
        self._supervisor.enter()
        if request.id in self.replies:
            raise ValueError(f"a request with the id {request.id!r} is already running")
        reply = self.replies[request.id] = PooledReply(request)
        try:
            while True:
                slot = await self._place(reply)
                chunks = reply.cut(self._supervisor.published.version) if slot is None else ()
                for chunk in chunks:
                    yield chunk
                if slot is None:
                    return
                async with aclosing(self._from(slot, reply)) as stream:
                    async for chunk in stream:
                        yield chunk
                if reply.over:
                    return
                self.num_retried += not reply.aborted
        finally:
            del self.replies[request.id]

    async def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        reply = self.replies.get(request_id)
        if reply is None:
            return
        reply.aborted = True
        self._supervisor.changed()
        asking = {
            asyncio.ensure_future(
                self._supervisor.ask(slot, "to abort a request", lambda member: member.abort(request_id), self._config.health_timeout_s)
            )
            for slot in self._supervisor.slots
            if request_id in slot.requests
        }
        self._asking |= asking
        for task in asking:
            task.add_done_callback(self._asking.discard)
        asyncio.get_running_loop().call_later(ABORTED_S, reply.stop_reading)
        if asking:
            await asyncio.wait(asking, timeout=ABORTED_S)

    async def _place(self, reply: PooledReply) -> Slot[M] | None:
        """The place for a request, after a wait if necessary; None: the request was aborted meanwhile.

        Raises:
            EngineFailed: if no member will take it.
        """
        while not reply.aborted:
            self._supervisor.enter()
            self._supervisor.published.check_whole()
            slot = choose(self._supervisor.slots, self._homes.get(reply.request.conversation), reply.failed_at)
            if slot is not None:
                return slot
            if self._supervisor.hopeless:
                raise self._supervisor.nobody_left()
            if reply.failure is not None and not others(self._supervisor.slots, reply.failed_at):
                raise reply.failure
            await self._supervisor.change()
        return None

    async def _from(self, slot: Slot[M], reply: PooledReply) -> AsyncGenerator[Chunk, None]:
        """Chunks that a member samples of a request. They just end if the member is lost, or if it
        fails and another may try."""
        member, request = slot.member, reply.request
        assert member is not None, "a request was placed where nobody is"
        if request.conversation in self._homes:
            self._move(request.conversation, slot)
        slot.requests.add(request.id)
        number = slot.breaker.passed()
        try:
            async with aclosing(member.generate(reply.rest)) as chunks:
                while (chunk := await reply.next_of(chunks)) is not None:
                    if slot.member is not member:  # it was lost meanwhile: nobody knows from which weights this is
                        break
                    if chunk.finish is not None:
                        slot.breaker.succeeded(number)
                    for piece in reply.take(chunk):
                        yield piece
        except EngineLost as lost:
            await self._supervisor.lose(slot, member, str(lost))
        except StaleCache as stale:
            if slot.name not in self._stale:
                self._stale.add(slot.name)
                self._report(slot, stale, "nothing is tried again: what was proven of its weights does not hold")
            raise
        except EngineFailed as failed:
            if self._deterministic:  # a breaker goes by the clock
                raise
            self._failed(slot, reply, failed, number)
            if not others(self._supervisor.slots, reply.failed_at):
                raise
        finally:
            slot.requests.discard(request.id)
            slot.breaker.ended(number)
            self._supervisor.changed()

    def _move(self, conversation: str, slot: Slot[M]) -> None:
        """An open conversation stays with a place from here on: its own could not take its request, or it had none."""
        home = self._homes[conversation]
        if home is slot:
            return
        if home is not None:
            leave(conversation, home)
        self._homes[conversation] = slot
        settle(conversation, slot)

    def _failed(self, slot: Slot[M], reply: PooledReply, failed: EngineFailed, number: int) -> None:
        reply.failed_at.add(slot.name)
        reply.failure = failed
        new = self._is_new(slot, failed)
        if slot.breaker.failed(number) or new:
            state = slot.breaker.state
            self._report(slot, failed, "its requests are tried elsewhere" + ("" if state == "closed" else "; its circuit breaker is open"))

    def _is_new(self, slot: Slot[M], failed: EngineFailed) -> bool:
        """True for a failure that the member has not had before, but for ids and numbers."""
        kinds, kind = self._kinds.setdefault(slot.name, set()), re.sub(r"request \S+|\d+", "", str(failed))
        new = kind not in kinds and len(kinds) < MOST_KINDS
        if new:
            kinds.add(kind)
        return new

    def _report(self, slot: Slot[M], error: EngineFailed, then: str) -> None:
        cause = f"{slot.name} failed with a request and lives: {error}"
        self._supervisor.on_incident(Incident(slot.name, cause, then, in_flight(slot, self.replies), {}))
