"""One model call, read to its end or to the deadline, with nothing lost that the engine had sampled by then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from whet.engine.base import Engine, closing_reply
from whet.env.deadline import Deadline
from whet.types import Chunk, Finish, ReplyLatency
from whet.types.columns import Floats, Growing, Ints, Ragged

ABORT_GRACE_S = 5.0
"""Seconds for an engine to hand over its sampled tokens after it was asked to stop."""


@dataclass(slots=True)
class Reply:
    """Tokens sampled so far. `finish` is None until the engine reports why the reply ended."""

    tokens: Growing[Ints] = field(default_factory=lambda: Growing(Ints))
    logprobs: Growing[Floats] = field(default_factory=lambda: Growing(Floats))
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (version, number of tokens)."""
    nucleus: list[Ragged] = field(default_factory=list)
    """Nuclei of the tokens, if the request asked for them."""
    finish: Finish | None = None
    latency: ReplyLatency | None = None
    """Reported by the engine with it."""

    def add(self, tokens: Ints, logprobs: Floats, versions: Iterable[tuple[int, int]], nucleus: Ragged | None) -> None:
        """More tokens at its end."""
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        if nucleus is not None:
            self.nucleus.append(nucleus)


LEAST_WAIT_S = 0.05
"""Between two looks at a deadline that a pause may have moved."""


async def read_reply(engine: Engine, request_id: str, chunks: AsyncIterator[Chunk], deadline: Deadline, reply: Reply) -> bool:
    """Fill `reply` with the tokens that the engine samples. If this raises or is cancelled, the tokens
    so far are in it.

    Args:
        engine: samples the tokens.
        request_id: names the request, to end it.
        chunks: the engine's reply to it, closed here.
        deadline: time at which the engine is asked to stop and to hand over its tokens.
        reply: filled here.

    Returns:
        True if the engine ended in time.
    """
    if deadline.left_s is None:
        await asyncio.sleep(0)  # siblings open their conversations before the first request
        await _read(chunks, reply)
        return True
    reading = asyncio.ensure_future(_read(chunks, reply))
    try:
        ended = await in_time(reading, deadline)
        if not ended:
            with suppress(TimeoutError):  # an engine that hangs does not answer an abort either
                async with asyncio.timeout(ABORT_GRACE_S):
                    await engine.abort(request_id)
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


async def _read(chunks: AsyncIterator[Chunk], reply: Reply) -> None:
    async with closing_reply(chunks) as stream:
        async for chunk in stream:
            reply.add(chunk.tokens, chunk.logprobs, [(chunk.version, len(chunk.tokens))], chunk.nucleus)
            if chunk.finish is not None:
                reply.finish, reply.latency = chunk.finish, chunk.latency
                break
