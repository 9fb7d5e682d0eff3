"""A server as a member of a pool, over its public routes.

Requests run while the gate is open. To pause, the gate closes and the server aborts what runs; each reply keeps its tokens and goes on
from them later, so one version sampled all tokens of an attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Protocol

from whet.engine.base import Capabilities, EngineFailed, EngineHealth, EngineLost, EngineRefused, StaleCache
from whet.engine.embedded.stops import Decode
from whet.engine.servers.http import HttpServer
from whet.engine.servers.reply import ServedReply
from whet.engine.servers.wire import SampledTokens, Wire
from whet.transport.base import Ticket
from whet.types import Chunk, Finish, Receipt, Request, Scored
from whet.types.columns import Ints

LOOK_S = 0.05
"""Between two looks of a waiting request at whether it was aborted, or its server cut off."""
HEALTH_S = 10.0
"""For a server that failed with a request to say whether it lives."""
RESET_S = 30.0
"""For a server to let go of its prefix cache."""
EMPTY_ATTEMPTS = 3
"""Attempts of a request in a row that may end without a token though nobody here asked for it."""


class ServerProcess(Protocol):
    """The process of a server that was started here."""

    def stacks(self) -> str:
        """Stacks of its threads; empty if they cannot be read."""
        ...

    def kill(self) -> None: ...

    def stop(self) -> None:
        """Have it end by itself, or else kill it."""
        ...


class ServerMember:
    """A `Member` that is a server.

    Args:
        server: its address; to be cut off when nothing of it counts any more.
        wire: its routes.
        decode: token ids to text, to find stop texts.
        process: its process; None: somebody else started it.
    """

    def __init__(self, server: HttpServer, wire: Wire, decode: Decode, process: ServerProcess | None = None) -> None:
        self._server, self._wire, self._decode, self._process = server, wire, decode, process
        self._label, self._version = wire.served.label, 0
        self._asleep = self._updated = False
        self._paused_there: bool | None = None
        """True while the server itself is paused; None: a client before may have left it so."""
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._replies: dict[str, ServedReply] = {}
        self._ids = itertools.count(1)
        self._client = secrets.token_hex(4)
        self._num_streams = 0
        self._changing = asyncio.Lock()
        self._busy_before_s = self._busy_since = 0.0
        self.num_dropped = 0
        """Sampled tokens that no reply has: after a stop text, and of replies that cannot be continued."""

    @property
    def name(self) -> str:
        return self._server.name

    @property
    def servers(self) -> Sequence[HttpServer]:
        """The servers that it consists of: itself, or those behind a router."""
        return self._server.behind or (self._server,)

    @property
    def capabilities(self) -> Capabilities:
        served = self._wire.served
        return Capabilities(served.max_tokens, shares_weights=False, deterministic=False, takes_adapters=served.takes_adapters)

    @property
    def receivers(self) -> list[str]:
        return list(self._wire.served.receivers)

    def open(self, conversation: str) -> None:
        """The pool keeps a conversation at one server; the server knows of none."""

    def release(self, conversation: str) -> None:
        """As `open`."""

    # Requests.

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """As `Engine.generate`."""
        if request.id in self._replies:
            raise ValueError(f"a request with the id {request.id!r} is already running")
        length = len(request.tokens) + request.sampling.max_tokens
        if not request.tokens or length > self._wire.served.max_tokens:
            longest = self._wire.served.max_tokens
            raise EngineRefused(f"request {request.id}: {length} tokens with its reply, and {self.name} runs {longest}")
        reply = self._replies[request.id] = ServedReply(request, self._decode)
        chunks = asyncio.Queue[Chunk | None]()
        reading = asyncio.ensure_future(self._read(reply, chunks))  # whether or not the caller reads on: a pause waits for it
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await reading
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            self.num_dropped += reply.num_dropped
            del self._replies[request.id]

    async def _read(self, reply: ServedReply, chunks: asyncio.Queue[Chunk | None]) -> None:
        """Put a reply's chunks into a queue, and None behind them, whatever ends them."""
        try:
            async with self._while_alive():
                await self._read_attempts(reply, chunks)
        finally:
            chunks.put_nowait(None)

    async def _read_attempts(self, reply: ServedReply, chunks: asyncio.Queue[Chunk | None]) -> None:
        num_empty = 0
        while num_empty < EMPTY_ATTEMPTS:
            rest = reply.rest
            if rest is None or not await self._may_begin(reply):
                chunks.put_nowait(reply.chunk(self._version, Finish.LENGTH if rest is None else Finish.ABORT))
                return
            num_sampled = 0
            async with aclosing(self._attempt(rest, reply)) as found:
                async for chunk in found:
                    num_sampled += len(chunk.tokens)
                    chunks.put_nowait(chunk)
                    if chunk.finish is not None:
                        return
            num_empty = num_empty + 1 if num_sampled == 0 and self._open.is_set() else 0
        raise EngineFailed(f"{self.name} ended request {reply.request.id} {num_empty} times without a token, and nobody asked it to")

    @asynccontextmanager
    async def _while_alive(self) -> AsyncIterator[None]:
        """Turn an error into EngineLost if the server's own health says that it was its end: its routes outlive its engine for a while."""
        try:
            yield
        except EngineLost:
            raise
        except EngineFailed as error:
            try:
                await asyncio.wait_for(self._wire.health(), HEALTH_S)
            except (EngineFailed, EngineRefused, TimeoutError) as dead:
                raise EngineLost(f"{error}; and {dead}") from error
            raise

    async def _may_begin(self, reply: ServedReply) -> bool:
        """Wait for the gate, and for a server that sleeps; False: the request was aborted meanwhile."""
        while not reply.aborted and (self._asleep or not self._open.is_set() or self._paused_there is None):
            self._server.check_cut()
            if self._paused_there is None and self._open.is_set():
                async with self._changing:
                    await self._resume_there()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._open.wait(), LOOK_S)
            if self._asleep:
                await asyncio.sleep(LOOK_S)
        return not reply.aborted

    async def _attempt(self, request: Request, reply: ServedReply) -> AsyncGenerator[Chunk, None]:
        """Chunks until the reply ends; they end without that if the server lets go of it."""
        reply.server_id = self._new_id()
        version, label = self._version, self._label
        with self._counted():
            async with aclosing(self._wire.stream(request, reply.server_id, label)) as events:
                async for sampled in events:
                    self._check_labels(request, sampled, label)
                    finish = Finish.STOP if reply.take(sampled) else self._finish(request, sampled, reply)
                    if finish is not None:
                        if finish is Finish.ABORT and reply.lacks_routes:
                            reply.let_go()
                        yield reply.chunk(version, finish)
                        return
                    if sampled.finish is not None:
                        break
                    if not (reply.withheld or reply.routed) and request.chunk_tokens and reply.num_waiting >= request.chunk_tokens:
                        yield reply.chunk(version, None)
        if reply.withheld or reply.lacks_routes:
            reply.let_go()
        elif reply.num_waiting:
            yield reply.chunk(version, None)

    def _finish(self, request: Request, sampled: SampledTokens, reply: ServedReply) -> Finish | None:
        match sampled.finish:
            case None:
                return None
            case "stop":
                return Finish.STOP
            case "length":
                return Finish.LENGTH
            case "abort":
                return Finish.ABORT if reply.aborted else None
            case other:
                raise EngineFailed(f"{self.name} ended request {request.id} with the finish reason {other!r}")

    def _check_labels(self, request: Request, sampled: SampledTokens, label: str) -> None:
        wrong = [each for each in sampled.labels or () if each != label]
        if wrong:
            raise StaleCache(
                f"{self.name} sampled {request.id} from weights that it calls {wrong[0]!r}, and whet left {label!r} there: somebody "
                "else changes its weights"
            )

    def _new_id(self) -> str:
        """A request's id at the server, which other clients may share."""
        return f"whet-{self._client}-{next(self._ids)}"

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """While a request runs at the server."""
        if self._num_streams == 0:
            self._busy_since = time.monotonic()
            self._idle.clear()
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1
            if self._num_streams == 0:
                self._busy_before_s += time.monotonic() - self._busy_since
                self._idle.set()

    async def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        reply = self._replies.get(request_id)
        if reply is None:
            return
        reply.aborted = True
        if reply.server_id:
            await self._wire.abort(reply.server_id)

    async def score(self, tokens: Ints, temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        """As `Engine.score`, at temperature 1 alone: servers have no other log-probs of a prompt."""
        if temperature != 1.0:
            raise EngineRefused(f"{self._wire.kind} scores tokens at temperature 1 alone, not {temperature}")
        async with self._while_alive(), self._changing:
            was_paused = self._paused_there is True
            await self._resume_there()  # a paused server answers nothing
            scored = await self._wire.score(tokens, top_logprobs, self._new_id())
            if was_paused:
                await self._pause_there()
        return scored

    # Pauses and weights.

    async def pause(self) -> None:
        """As `Engine.pause`."""
        self._open.clear()
        async with self._while_alive(), self._changing:
            await self._pause_there()
            while self._num_streams:  # the last words of what was aborted
                self._server.check_cut()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), LOOK_S)

    async def resume(self) -> None:
        """As `Engine.resume`."""
        async with self._while_alive(), self._changing:
            await self._resume_there()
        self._open.set()

    async def _pause_there(self) -> None:
        if self._paused_there is not True:
            await self._wire.pause()
            self._paused_there = True

    async def _resume_there(self) -> None:
        if self._paused_there is not False:
            await self._wire.resume()
            self._paused_there = False

    async def flush(self) -> None:
        """As `Engine.flush`."""
        deadline = time.monotonic() + RESET_S
        async with self._while_alive():
            while not await self._wire.flush():
                if time.monotonic() > deadline:
                    raise EngineFailed(f"{self.name} did not let go of its prefix cache within {RESET_S:g} s")
                await asyncio.sleep(LOOK_S)

    async def sleep(self) -> None:
        """As `Engine.sleep`."""
        async with self._while_alive(), self._changing:
            if not self._asleep:
                await self._wire.sleep()
                self._asleep = True

    async def update(self, ticket: Ticket, version: int) -> Receipt:
        """As `WeightCalls.update`. A server that fails in the middle holds half of the weights: it is lost."""
        if self._updated and version <= self._version:
            raise ValueError(f"{self.name} holds version {self._version} already, and was asked to take over version {version}")
        began = time.monotonic()
        async with self._changing:
            try:
                await self._pause_there()  # a client before may have left requests there
                if self._asleep:
                    await self._wire.wake("weights")
                wire = await self._wire.load(ticket, version)
                if self._asleep:
                    await self._wire.wake("kv_cache")
                await self.flush()
                held, checksums = await self._wire.held(), await self._wire.checksums()
                label = await self._wire.label()
                if label != str(version):
                    raise EngineFailed(f"it calls its weights {label!r} after the update")
            except (EngineFailed, EngineRefused) as error:
                words = str(error).removeprefix(f"{self.name}: ")
                raise EngineLost(f"{self.name}: version {version} arrived in part, if at all: {words}") from error
            self._version, self._label, self._asleep, self._updated = version, label, False, True
            if self._open.is_set():
                await self._resume_there()
        dtype, load_s = self._wire.served.dtype, time.monotonic() - began
        return Receipt(version, wire, None, held, checksums, dtype, engine=self.name, load_s=load_s)

    # Supervision.

    async def health(self) -> EngineHealth:
        """As `EngineCalls.health`: the server answers, and has its engine."""
        try:
            await self._wire.health()
            prefix = await self._wire.prefix_use()
        except (EngineFailed, EngineRefused) as error:
            raise EngineLost(str(error)) from error
        running_s = time.monotonic() - self._busy_since if self._num_streams else 0.0
        return EngineHealth(self._busy_before_s + running_s, 0.0, prefix)

    def stacks(self, *, lost: bool) -> str:
        return "" if self._process is None else self._process.stacks()

    def kill(self) -> None:
        self._server.cut("it was cut off")
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        self._server.cut("it was closed")
        if self._process is not None:
            self._process.stop()
