"""A server of an engine over HTTP, and a plain `Member` that talks to it: what vLLM's and SGLang's clients are built like."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tests.fakes import FakeEngine, FakeMember, Script, by_place
from whet.engine.base import Capabilities, EngineFailed, EngineHealth, EngineLost, EngineRefused
from whet.engine.pool.config import Supervision
from whet.engine.pool.member import Incident, Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.model.causal import CausalModel
from whet.model.digest import digests_of
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.transport.base import DiskTicket, Ticket
from whet.transport.folder import read_folder
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig
from whet.types import Chunk, Finish, Receipt, Request, SamplingParams, Scored

HOST = "127.0.0.1"
QUICK = Supervision(restarts=2, restart_backoff_s=0.01, health_every_s=0.05, health_timeout_s=5.0)
ERRORS = {"EngineRefused": EngineRefused, "EngineFailed": EngineFailed, "ValueError": ValueError}
SERVED = Capabilities(256, False, False)
Route = Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any], None]]


def read_digests(model: CausalModel, ticket: DiskTicket) -> dict[str, str]:
    """Digests of the weights in a folder, as an engine of the model's shape reads them."""
    return digests_of(read_folder(ticket, Naming(without_contents(model))))


def score_of(weights: object, tokens: tuple[int, ...]) -> Scored:
    """A score that tells weights apart, and is the same on every server that holds the same."""
    return Scored(tuple(-((sum(str(sorted(dict(weights or {}).items())).encode()) + 31 * token) % 997) / 100 for token in tokens[1:]))


class EngineServer:
    """An engine behind HTTP routes, with an event loop in a thread of its own. Each answer is JSON, a line for each piece of it.

    Args:
        model: of the shape of its weights.
        script: what it replies.
    """

    def __init__(self, model: CausalModel, script: Script = by_place) -> None:
        self._model, self.engine = model, FakeEngine(script, capabilities=SERVED, pace_s=0.001)
        self._routes: dict[str, Route] = {"/generate": self._generate, "/update": self._update}
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop, up = asyncio.new_event_loop(), threading.Event()
        self._ends = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(up)), daemon=True)
        self._thread.start()
        assert up.wait(10)

    def die(self) -> None:
        """End in the middle of whatever it does."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self, up: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, HOST, 0)
        self.port: int = server.sockets[0].getsockname()[1]
        up.set()
        await self._ends.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.wait({task})

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split(" ")[1]
            length = next(int(line.partition(":")[2]) for line in head if line.lower().startswith("content-length:"))
            body = json.loads(await reader.readexactly(length) or b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n")
            async with aclosing(self._answer(path, body)) as lines:
                async for line in lines:
                    writer.write(json.dumps(line, default=list).encode() + b"\n")
                    await writer.drain()
        writer.close()
        self._writers.discard(writer)

    async def _answer(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        try:
            async with aclosing(self._routes.get(path, partial(self._call, path))(body)) as lines:
                async for line in lines:
                    yield line
        except (EngineRefused, EngineFailed, ValueError) as error:
            yield {"error": type(error).__name__, "text": str(error)}

    async def _generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        sampling = {**body["sampling"], "stop_token_ids": tuple(body["sampling"]["stop_token_ids"])}
        request = Request(
            body["id"],
            tuple(body["tokens"]),
            SamplingParams(**sampling),
            chunk_tokens=body["chunk_tokens"],
            num_begun=body["num_begun"],
        )
        async with aclosing(self.engine.generate(request)) as chunks:
            async for chunk in chunks:
                finish = None if chunk.finish is None else chunk.finish.value
                yield {"tokens": chunk.tokens, "logprobs": chunk.logprobs, "version": chunk.version, "finish": finish}

    async def _update(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        found = read_digests(self._model, DiskTicket(body["version"], Path(body["folder"])))
        yield asdict(await self.engine.update(found.items(), body["version"]))

    async def _call(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        match path:
            case "/score":
                await self.engine.score(tuple(body["tokens"]))
                yield {"logprobs": score_of(self.engine.weights, tuple(body["tokens"])).logprobs}
            case "/health":
                yield {"busy_s": await self.engine.busy_s(), "max_tokens": SERVED.max_tokens}
            case "/abort":
                await self.engine.abort(body["id"])
                while body["id"] in self.engine.running and not self.engine.paused:
                    await asyncio.sleep(0)
                yield {}
            case "/pause" | "/resume" | "/flush" | "/sleep":
                await getattr(self.engine, path[1:])()
                yield {}
            case "/shutdown":
                self._ends.set()
                yield {}


class HttpMember:
    """A `Member` that is a server: it holds no process and no tensor, only the address.

    Args:
        name: its name in errors.
        port: of the server on this machine.

    Raises:
        EngineFailed: if no server answers.
    """

    def __init__(self, name: str, port: int) -> None:
        self._name, self._port = name, port
        self.receivers = [name]
        self._lost: str | None = None
        """Why no answer of it counts any more."""
        self._open: set[tuple[asyncio.AbstractEventLoop, asyncio.StreamWriter]] = set()
        try:
            self.capabilities = Capabilities(self._now("/health")["max_tokens"], False, False)
        except OSError as error:
            raise EngineFailed(f"{name} did not start: {error}") from error

    def open(self, conversation: str) -> None:
        """A server opens nothing: the pool keeps a conversation at one member."""

    def release(self, conversation: str) -> None:
        pass

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        sampling = {name: getattr(request.sampling, name) for name in ("max_tokens", "temperature", "seed", "stop_token_ids")}
        body = {"sampling": sampling, **{name: getattr(request, name) for name in ("id", "tokens", "chunk_tokens", "num_begun")}}
        finished = False
        try:
            async with aclosing(self._ask("/generate", body)) as lines:
                async for line in lines:
                    finish = None if line["finish"] is None else Finish(line["finish"])
                    finished = finish is not None
                    yield Chunk(tuple(line["tokens"]), tuple(line["logprobs"]), line["version"], finish)
            if not finished:
                raise EngineLost(f"{self._name} ended in the middle of request {request.id}")
        except (EngineLost, EngineFailed, EngineRefused, ValueError):
            finished = True
            raise
        finally:
            if not finished:  # the consumer went away early
                with suppress(EngineFailed):
                    await self.abort(request.id)

    async def abort(self, request_id: str) -> None:
        await self._call("/abort", {"id": request_id})

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        return Scored(tuple((await self._call("/score", {"tokens": tokens}))["logprobs"]))

    async def pause(self) -> None:
        await self._call("/pause")

    async def resume(self) -> None:
        await self._call("/resume")

    async def flush(self) -> None:
        await self._call("/flush")

    async def sleep(self) -> None:
        await self._call("/sleep")

    async def update(self, ticket: Ticket, version: int) -> Receipt:
        assert isinstance(ticket, DiskTicket), "a server reads folders"
        return Receipt(**await self._call("/update", {"version": version, "folder": str(ticket.folder)}))

    async def health(self) -> EngineHealth:
        return EngineHealth((await self._call("/health"))["busy_s"], 0.0)

    def stacks(self, *, lost: bool) -> str:
        return ""

    def kill(self) -> None:
        self._cut(f"{self._name} was cut off")

    def stop(self) -> None:
        with suppress(OSError, http.client.HTTPException):
            self._now("/shutdown")
        self._cut(f"{self._name} was closed")

    def _cut(self, why: str) -> None:
        """Have every waiting call raise, and every later one."""
        self._lost = self._lost or why
        for loop, writer in list(self._open):
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(writer.transport.abort)

    def _now(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=10)
        try:
            connection.request("POST", path, b"{}")
            return json.loads(connection.getresponse().readline() or b"{}")
        finally:
            connection.close()

    async def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with aclosing(self._ask(path, body or {})) as lines:
            async for line in lines:
                return line
        raise EngineLost(f"{self._name} answered {path} with nothing")

    async def _ask(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The lines of an answer, as they come.

        Raises:
            EngineLost: if the server is gone, or was cut off.
        """
        mine = None
        try:
            if self._lost is not None:
                raise ConnectionError(self._lost)
            reader, writer = await asyncio.open_connection(HOST, self._port)
            mine = asyncio.get_running_loop(), writer
            self._open.add(mine)
            raw = json.dumps(body, default=list).encode()
            writer.write(f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
            await reader.readuntil(b"\r\n\r\n")
            while line := await reader.readline():
                if self._lost is not None or not line.endswith(b"\n"):
                    raise ConnectionError("it ended in the middle of an answer")
                found = json.loads(line)
                if "error" in found:
                    raise ERRORS[found["error"]](found["text"])
                yield found
            if self._lost is not None:
                raise ConnectionError(self._lost)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            self._lost = self._lost or f"{self._name} is gone: {error}"
            raise EngineLost(self._lost) from error
        finally:
            if mine is not None:
                self._open.discard(mine)
                mine[1].transport.abort()


class FolderMember(FakeMember):
    """A fake member that reads the same folders as the servers."""

    model: CausalModel

    async def update(self, ticket: Ticket, version: int) -> Receipt:
        assert isinstance(ticket, DiskTicket)
        await self.here()
        return await FakeEngine.update(self, read_digests(self.model, ticket).items(), version)

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        await self.here()
        return score_of(self.weights, tokens)


class ServerPool(EnginePool[Any]):
    """A pool of servers that it starts, and of what else is given.

    Args:
        model: of the shape of the weights.
        num: of servers.
        others: other members, by their names.
        script: what servers reply.
    """

    def __init__(self, model: CausalModel, num: int, others: dict[str, Any] | None = None, script: Script = by_place) -> None:
        self.servers: list[EngineServer] = []
        self.told: list[Incident] = []

        def start(name: str, given_up: threading.Event) -> HttpMember:
            self.servers.append(EngineServer(model, script))
            return HttpMember(name, self.servers[-1].port)

        nobody = threading.Event()
        starts = {f"server {i}": partial(start, f"server {i}") for i in range(num)}
        slots = [Slot(name, begin, begin(nobody), breaker_of(QUICK)) for name, begin in starts.items()]
        slots += [Slot(name, lambda given_up, made=made: made, made, breaker_of(QUICK)) for name, made in (others or {}).items()]
        sender = sender_of(SyncConfig(transport="disk"), model, Path(mkdtemp(prefix="whet-servers-")), HOST)
        super().__init__(slots, WeightSync(sender, dict(model.named_weights())), QUICK, deterministic=False, on_incident=self.told.append)

    def end(self) -> None:
        super().end()
        for server in self.servers:
            server.die()
