"""A server's routes over HTTP: JSON calls and streams of events, from any event loop, cut at once from any thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from whet.engine.base import EngineFailed, EngineLost, EngineRefused

T = TypeVar("T")

CONNECT_S = 10.0
KEEP_S = 1.0
"""An idle connection is kept for so long: servers close theirs after five seconds, which a request on its way would not survive."""
MAX_LINE_BYTES = 2**26
"""Longest event of a stream: its log-probs, masks and experts are one line."""
METRICS = "/metrics"
MAX_METRICS_BYTES = 2**22
"""Longest text of a server's metrics."""
SHOWN_CHARS = 500
"""Shown of a server's error."""
DONE = "[DONE]"
KEY = "WHET_ENGINE_KEY"
"""Environment variable with the key of servers that somebody else started."""


class HttpServer:
    """Client of one server.

    Args:
        name: name of the server in errors.
        url: address, `http://HOST:PORT`.
        key: sent as a bearer token; None: none.

    Raises:
        ValueError: if the address is not that of an HTTP server.
    """

    def __init__(self, name: str, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not the address of a server; write http://HOST:PORT")
        self.name, self.url, self.host = name, url.rstrip("/"), parts.hostname
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._ends: set[tuple[asyncio.AbstractEventLoop, Callable[[], object]]] = set()
        """Calls that end the waiting ones, each on its loop."""
        self._lock = threading.Lock()
        self.behind: tuple[HttpServer, ...] = ()
        """Servers that are reached through it, where it is a router."""
        self.cut_off: str | None = None
        """Why no answer of it counts any more, once it was cut off."""

    async def get(self, path: str) -> Any:
        """The JSON of a GET route; None: an answer without a body. Errors as `post`."""
        return await self._call("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of a POST route; None: an answer without a body.

        Raises:
            EngineLost: if the server is gone, or was cut off.
            EngineRefused: if it answers with a status from 400 to 499: the same call would fail again.
            EngineFailed: if it answers with another error.
        """
        return await self._call("POST", path, {} if body is None else body)

    async def metrics_text(self) -> str:
        """The text of the server's own `/metrics`. Errors as `post`; also EngineFailed if it is longer than any server's is."""
        return await self._unless_cut(METRICS, self._answer("GET", METRICS, None, MAX_METRICS_BYTES))

    async def post_text(self, path: str, body: Mapping[str, Any]) -> str:
        """The text of a POST route whose answer is no JSON. Errors as `post`."""
        return await self._unless_cut(path, self._answer("POST", path, body))

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        text = await self._unless_cut(path, self._answer(method, path, body))
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise EngineFailed(f"{self.name}: {path} answered what is no JSON: {text[:SHOWN_CHARS]!r}") from error

    async def events(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream. Errors as `post`; also EngineLost if the stream ends before the server says that it is over."""
        over = False
        answer = await self._unless_cut(path, self._session().post(self.url + path, json=body, headers=headers))
        try:
            async with answer:
                if answer.status != 200:
                    self._check(answer.status, path, await self._unless_cut(path, answer.text(errors="replace")))
                with self._cut_with(answer):
                    async for raw in answer.content:
                        line = raw.decode().strip()
                        if not line.startswith("data:"):
                            continue
                        data = line[5:].strip()
                        if data == DONE:
                            over = True
                            break
                        self.check_cut()
                        yield self._event(path, data)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        self.check_cut()
        if not over:
            raise EngineLost(f"{self.name}: the stream of {path} ended in the middle")

    def cut(self, why: str) -> None:
        """Have every waiting call raise EngineLost, and every later one. Any thread; idempotent."""
        with self._lock:
            self.cut_off = self.cut_off or why
            sessions, self._sessions = self._sessions, {}
            ends, self._ends = self._ends, set()
        # First the streams: a session that is closed forgets them, and who reads one of them would wait forever.
        for loop, end in [*ends, *((loop, partial(_close, session)) for loop, session in sessions.items())]:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(end)

    async def close(self) -> None:
        """Close the connections of the present loop, on which nothing runs any more."""
        with self._lock:
            session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None, most_bytes: int | None = None) -> str:
        async with self._session().request(method, self.url + path, json=body) as answer:
            text = await (answer.text(errors="replace") if most_bytes is None else self._bounded(answer, path, most_bytes))
            self._check(answer.status, path, text)
            return text

    async def _bounded(self, answer: aiohttp.ClientResponse, path: str, most_bytes: int) -> str:
        """The text of an answer of at most `most_bytes`."""
        found = bytearray()
        async for piece in answer.content.iter_any():
            found += piece
            if len(found) > most_bytes:
                raise EngineFailed(f"{self.name}: {path} answered more than {most_bytes} bytes")
        return found.decode("utf-8", "replace")

    async def _unless_cut(self, path: str, work: Awaitable[T]) -> T:
        """The result of some work, which ends when the server is cut off."""
        task = asyncio.ensure_future(work)
        try:
            with self._ended_by(task.cancel):
                found = await task
        except asyncio.CancelledError:
            self.check_cut()
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(path, error) from error
        finally:
            task.cancel()
        self.check_cut()
        return found

    @contextmanager
    def _cut_with(self, answer: aiohttp.ClientResponse) -> Iterator[None]:
        """Have a cut break an answer off while it is read."""
        connection = answer.connection
        if connection is None or connection.transport is None:  # all of it is there already
            yield
            return
        with self._ended_by(connection.transport.abort):
            yield

    @contextmanager
    def _ended_by(self, end: Callable[[], object]) -> Iterator[None]:
        """Have a cut call something on the present loop."""
        entry = (asyncio.get_running_loop(), end)
        with self._lock:
            self.check_cut()  # a later cut finds it
            self._ends.add(entry)
        try:
            yield
        finally:
            with self._lock:
                self._ends.discard(entry)

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        with self._lock:
            self.check_cut()
            session = self._sessions.get(loop)
            if session is None:
                self._sessions = {each: kept for each, kept in self._sessions.items() if not each.is_closed()}
                session = self._sessions[loop] = aiohttp.ClientSession(
                    headers=self._headers,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),  # the pool has the deadlines
                    connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S),
                    read_bufsize=MAX_LINE_BYTES,
                    trust_env=False,
                )
        return session

    def _event(self, path: str, data: str) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError as error:
            raise EngineFailed(f"{self.name}: {path} sent an event that is no JSON: {data[:SHOWN_CHARS]!r}") from error
        if not isinstance(found, dict) or "error" in found:
            raise EngineFailed(f"{self.name}: {path} failed: {data[:SHOWN_CHARS]}")
        return found

    def _check(self, status: int, path: str, text: str) -> None:
        if status < 400:
            return
        words = f"{self.name}: {path} answered HTTP {status}: {_words(text)}"
        if status in (401, 403) and "scale-out" in text.lower():
            words += "; start the server with --enable-scale-out"
        elif status in (401, 403):
            words += f"; set the server's key in the environment variable {KEY}"
        raise (EngineFailed if status >= 500 or status in (408, 429) else EngineRefused)(words)

    def check_cut(self) -> None:
        """Raises EngineLost if it was cut off."""
        if self.cut_off is not None:
            raise EngineLost(f"{self.name}: {self.cut_off}")

    def _lost(self, path: str, error: Exception) -> EngineLost:
        return EngineLost(f"{self.name}: {self.cut_off or f'{self.url}{path} is gone: {type(error).__name__}: {error}'}")


def _close(session: aiohttp.ClientSession) -> None:
    """Close the connections of a session, those in use, too; runs on its loop."""
    closing = asyncio.ensure_future(session.close())
    closing.add_done_callback(lambda done: done.exception() if not done.cancelled() else None)


def _words(text: str) -> str:
    """The message of an error's body."""
    with suppress(ValueError, TypeError, KeyError):
        found = json.loads(text)
        found = found.get("error", found.get("detail", found))
        return str(found.get("message", found) if isinstance(found, dict) else found)[:SHOWN_CHARS]
    return text[:SHOWN_CHARS]
