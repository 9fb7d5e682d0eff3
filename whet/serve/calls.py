"""The requests in progress: each is one or several engine requests, whose chunks come back as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from whet.engine.base import Engine, EngineFailed, EngineRefused, closing_reply
from whet.serve.errors import ApiError
from whet.serve.gate import Admission, Gate
from whet.types import Chunk, Finish, Request, Scored
from whet.types.columns import Floats, Ints

ABORT_GRACE_S = 10.0
"""Seconds for the engine to hand over its tokens after it was asked to stop."""


@dataclass(slots=True, eq=False)
class Call:
    """A client's call, from its arrival to its end."""

    id: str
    requests: tuple[Request, ...]
    score: bool = False
    """Score the prompts' tokens, too: under the model's own distribution, for any sampling."""
    top_scores: int = 0
    """Number of most likely tokens to report at each of their places."""
    generate: bool = True
    """False: nothing is to be sampled."""
    ticket: Admission = field(init=False)
    scores: dict[int, Scored] = field(default_factory=dict[int, Scored])
    """Scores of the requests' tokens from the second on, by the request's place."""
    scoring: dict[Ints, asyncio.Future[Scored]] = field(default_factory=dict[Ints, asyncio.Future[Scored]])
    """Scores by the tokens: the samples of a prompt share one score."""
    abort_reason: str = ""
    """Why it was aborted; empty: it was not."""

    def __post_init__(self) -> None:
        self.ticket = Admission(len(self.requests))


CallChunk = tuple[int, Chunk]
"""The place of a request in its call, and what it sampled."""


Generate = Callable[[Request], AsyncIterator[Chunk]]
"""Samples a request, as `Engine.generate` does."""


class Calls:
    """Runs calls over an engine and knows those that are running.

    Args:
        engine: samples the requests.
        gate: lets calls in.
        timeout_s: seconds that a call may take, waiting included.
        generate: samples the requests in place of the engine itself.
    """

    def __init__(self, engine: Engine, gate: Gate, timeout_s: float, generate: Generate | None = None) -> None:
        self._engine, self._gate, self._timeout_s = engine, gate, timeout_s
        self._generate = generate
        self._open: dict[str, Call] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def run(self, call: Call) -> AsyncGenerator[CallChunk, None]:
        """Chunks of a call as they come; each request's last one carries how it ended. If the reader
        stops, the engine's requests end.

        Raises:
            ApiError: it cannot run, a call with its id is running, or the engine failed or hangs.
        """
        running = {call.id} | {request.id for request in call.requests}
        if taken := running & {name for each in self._open.values() for name in (each.id, *(request.id for request in each.requests))}:
            raise ApiError(400, f"a request with the id {min(taken)!r} is already running", param="rid")
        self._open[call.id] = call
        pieces: asyncio.Queue[CallChunk | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        reason = f"it took longer than {self._timeout_s:g} s (limits.timeout_s)"
        late = loop.call_later(self._timeout_s, lambda: loop.create_task(self._abort(call, reason)))
        hung = ApiError(504, f"{reason}, and the engine does not answer")
        lost = loop.call_later(self._timeout_s + ABORT_GRACE_S, lambda: pieces.put_nowait(hung))
        pumps: list[asyncio.Task[None]] = []
        entered = False
        try:
            entered = await self._gate.enter(call.ticket)
            pumps = [loop.create_task(self._pump(call, place, pieces)) for place in range(len(call.requests))]
            left = len(pumps)
            while left:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    raise _for_client(piece)
                left -= piece[1].finish is not None
                yield piece
        finally:
            late.cancel()
            lost.cancel()
            del self._open[call.id]
            for pump in pumps:
                pump.cancel()
            try:
                await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                if entered:
                    self._gate.leave(call.ticket)

    async def abort(self, call_id: str, reason: str) -> None:
        """End a call; what it sampled is handed over. Ids of its single requests will do, unknown ones are ignored."""
        for call in [call for call in self._open.values() if call_id == call.id or call_id in (r.id for r in call.requests)]:
            await self._abort(call, reason)

    async def abort_all(self, reason: str) -> None:
        for call in list(self._open.values()):
            await self._abort(call, reason)

    async def _abort(self, call: Call, reason: str) -> None:
        call.abort_reason = call.abort_reason or reason
        self._gate.give_up(call.ticket)
        for request in call.requests:
            await self._engine.abort(request.id)

    async def _pump(self, call: Call, place: int, pieces: asyncio.Queue[CallChunk | Exception]) -> None:
        try:
            async with aclosing(self._chunks(call, place)) as chunks:
                async for chunk in chunks:
                    pieces.put_nowait((place, chunk))
        except Exception as error:  # belongs to the reader of the pieces
            pieces.put_nowait(error)

    async def _chunks(self, call: Call, place: int) -> AsyncGenerator[Chunk, None]:
        request = call.requests[place]
        if call.score and not call.abort_reason:
            call.scores[place] = await self._score(call, request)
        if call.abort_reason or not call.generate:  # the engine never sees it
            yield Chunk(Ints(), Floats(), self._engine.version, Finish.ABORT if call.abort_reason else Finish.LENGTH)
            return
        async with closing_reply((self._generate or self._engine.generate)(request)) as stream:
            async for chunk in stream:
                yield chunk
                if chunk.finish is not None:
                    return

    async def _score(self, call: Call, request: Request) -> Scored:
        if request.tokens not in call.scoring:
            call.scoring[request.tokens] = asyncio.ensure_future(self._engine.score(request.tokens, 1.0, call.top_scores))
        return await call.scoring[request.tokens]


def _for_client(error: Exception) -> Exception:
    """An engine's error in the form for a client."""
    if isinstance(error, EngineRefused):
        return ApiError(400, str(error), code="context_length_exceeded" if "over the limit" in str(error) else None)
    if isinstance(error, EngineFailed):
        return ApiError(503, f"the engine failed: {error}")
    return error
