"""One model call, read to its end or to the deadline, with nothing lost that the engine had sampled by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from whet.engine.base import Engine, EngineFailed, closing_reply
from whet.env.deadline import Deadline
from whet.types import Chunk, Finish, ReplyLatency, Request
from whet.types.columns import Floats, Growing, Ints, Ragged
from whet.types.routes import Routes

ABORT_GRACE_S = 5.0
"""Seconds for an engine to hand over its sampled tokens after it was asked to stop."""


@dataclass(slots=True)
class Reply:
    """Tokens sampled so far. `finish` is None until the engine reports why the reply ended."""

    num_context: int = 0
    """Tokens of the turn before the reply."""
    tokens: Growing[Ints] = field(default_factory=lambda: Growing(Ints))
    logprobs: Growing[Floats] = field(default_factory=lambda: Growing(Floats))
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (version, number of tokens)."""
    nucleus: list[Ragged] = field(default_factory=list)
    """Nuclei of the tokens, if the request asked for them."""
    routes: list[Routes] = field(default_factory=list)
    """Experts of the turn's context and tokens, if the request asked for them."""
    finish: Finish | None = None
    latency: ReplyLatency | None = None
    """Reported by the engine with it."""

    def add(
        self,
        tokens: Ints,
        logprobs: Floats,
        versions: Iterable[tuple[int, int]],
        nucleus: Ragged | None,
        routes: Routes | None = None,
    ) -> None:
        """More tokens at its end."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        if nucleus is not None:
            self.nucleus.append(nucleus)
        if routes is not None:
            self.routes.append(routes)


    def take(self, chunk: Chunk, request: Request) -> None:
        """A chunk that an engine sampled for a request, at its end.

        Raises:
            EngineFailed: if the experts that were asked for did not come along.
        """
        routed = request.sampling.routes and len(chunk.tokens) > 0
        wanted = self.num_context + len(self.tokens) + len(chunk.tokens) - sum(map(len, self.routes))
        if routed and len(chunk.routes) != wanted:
            raise EngineFailed(
                f"request {request.id}: the experts of {wanted} tokens were asked for (train.routing_replay=rollout), and those of "
                f"{len(chunk.routes)} came; nothing of it is used"
            )
        nucleus = chunk.nucleus if request.sampling.nucleus else None
        self.add(chunk.tokens, chunk.logprobs, [(chunk.version, len(chunk.tokens))], nucleus, chunk.routes if routed else None)
        if chunk.finish is not None:
            self.finish, self.latency = chunk.finish, chunk.latency

    def routes_from(self, num_tokens: int) -> int:
        """`Request.routes_from` of a request that goes on with the reply; `num_tokens`: of its context."""
        return num_tokens - self.num_context - len(self.tokens) + sum(map(len, self.routes))

    @property
    def all_routes(self) -> Routes:
        """Experts of the turn's context and tokens; unknown as long as nothing was sampled."""
        return Routes.join(self.routes) if self.routes else Routes.unknown(self.num_context + len(self.tokens))


LEAST_WAIT_S = 0.05
"""Between two looks at a deadline that a pause may have moved."""


async def read_reply(engine: Engine, request: Request, chunks: AsyncIterator[Chunk], deadline: Deadline, reply: Reply) -> bool:
    """Fill `reply` with the tokens that the engine samples. If this raises or is cancelled, the tokens
    so far are in it.

    Args:
        engine: samples the tokens.
        request: the request to continue.
        chunks: the engine's reply to it, closed here.
        deadline: time at which the engine is asked to stop and to hand over its tokens.
        reply: filled here.

    Returns:
        True if the engine ended in time.
    """
    if deadline.left_s is None:
        await asyncio.sleep(0)  # siblings open their conversations before the first request
        await _read(request, chunks, reply)
        return True
    reading = asyncio.ensure_future(_read(request, chunks, reply))
    try:
        ended = await in_time(reading, deadline)
        if not ended:
            with suppress(TimeoutError):  # an engine that hangs does not answer an abort either
                async with asyncio.timeout(ABORT_GRACE_S):
                    await engine.abort(request.id)
                    await asyncio.wait({reading})
        if reading.done():
            reading.result()
        return ended
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def in_time(work: asyncio.Future[Any], deadline: Deadline) -> bool:
    """Wait until it has ended, or its time is over; True if it has ended."""
    while not work.done() and (left_s := deadline.left_s) != 0:
        await asyncio.wait({work}, timeout=None if left_s is None else max(left_s, LEAST_WAIT_S))
    return work.done()


async def _read(request: Request, chunks: AsyncIterator[Chunk], reply: Reply) -> None:
    async with closing_reply(chunks) as stream:
        async for chunk in stream:
            reply.take(chunk, request)
            if chunk.finish is not None:
                break
