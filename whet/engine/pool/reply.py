"""A request on its way through a pool: what was sampled of it so far, wherever, so that another engine can go on from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

from whet.engine.base import EngineFailed
from whet.types import Chunk, Finish, Request
from whet.types.columns import Floats, Ints, Ragged
from whet.types.routes import Routes

HANDOVER_TOKENS = 32
"""Largest number of tokens between two handovers by a member: this many tokens of a reply are sampled
again if the member dies."""


@dataclass(slots=True, eq=False)
class PooledReply:
    """A request, and the chunks that members have handed over.

    The caller gets each token once: at once if the request asks for chunks, otherwise all together at
    the end.
    """

    request: Request
    chunks: list[Chunk] = field(default_factory=list)
    num_sampled: int = 0
    given_out: int = 0
    """Number of `chunks` that the caller has."""
    aborted: bool = False
    failed_at: set[str] = field(default_factory=set)
    """Names of members that failed with it and live."""

    failure: EngineFailed | None = None
    """Error of the last of these members."""
    reading: asyncio.Future[Chunk | None] | None = None
    """Read of the present member's next chunk."""

    @property
    def over(self) -> bool:
        """True if the last chunk says how the reply ended."""
        return bool(self.chunks) and self.chunks[-1].finish is not None

    @property
    def rest(self) -> Request:
        """The request for the rest of the reply: the same request, continued from the tokens so far.

        A token's noise depends on the request's seed and the token's place, so within one version the
        reply is the same as without the interruption.
        """
        begun = [chunk.tokens for chunk in self.chunks]
        asked, sampling = self.request, self.request.sampling
        left = sampling.max_tokens - self.num_sampled
        assert left > 0, "an engine that had sampled all tokens of a request did not say that it was over"
        return replace(
            asked,
            tokens=Ints.join([asked.tokens, *begun]),
            sampling=replace(sampling, max_tokens=left),
            chunk_tokens=min(asked.chunk_tokens or HANDOVER_TOKENS, HANDOVER_TOKENS),
            num_begun=asked.num_begun + self.num_sampled,
            routes_from=len(asked.tokens) + self.num_sampled if self.num_sampled else asked.routes_from,
        )

    async def next_of(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """A member's next chunk; None: it says no more, or is waited for no longer."""
        reading = self.reading = asyncio.ensure_future(anext(chunks, None))
        try:
            await asyncio.wait({reading})
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.wait({reading})
        return None if reading.cancelled() else reading.result()

    def stop_reading(self) -> None:
        """Wait for no more chunks."""
        if self.reading is not None:
            self.reading.cancel()

    def take(self, chunk: Chunk) -> Iterator[Chunk]:
        """Record a chunk, and yield the chunks that the caller gets now."""
        if self.chunks:  # what a later member found cached is of its own history
            chunk = replace(chunk, num_cached=self.chunks[0].num_cached)
        self.chunks.append(chunk)
        self.num_sampled += len(chunk.tokens)
        if not self.request.chunk_tokens and chunk.finish is None:
            return
        news = self.chunks[self.given_out :]
        self.given_out = len(self.chunks)
        yield from _joined(news)

    def cut(self, version: int) -> Iterator[Chunk]:
        """End it as aborted with what there is."""
        return self.take(Chunk(Ints(), Floats(), version, Finish.ABORT))


def _joined(chunks: list[Chunk]) -> Iterator[Chunk]:
    """Chunks that follow each other, those of one version as one; an empty one at the end goes with what is before it."""
    if len(chunks) > 1 and not chunks[-1].tokens:
        *chunks, last = chunks
        chunks[-1] = replace(chunks[-1], finish=last.finish, latency=last.latency)
    for version, run in groupby(chunks, key=lambda chunk: chunk.version):
        parts = list(run)
        yield Chunk(
            Ints.join(part.tokens for part in parts),
            Floats.join(part.logprobs for part in parts),
            version,
            parts[-1].finish,
            Floats.join(part.raw_logprobs for part in parts),
            tuple(top for part in parts for top in part.top_logprobs),
            Ragged.join(part.nucleus for part in parts),
            Routes.join(part.routes for part in parts),
            parts[0].num_cached,
            parts[-1].latency,
        )
