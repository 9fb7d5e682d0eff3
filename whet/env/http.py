"""JSON over HTTP with deadlines that hold, for rewards and environments that ask a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TypeVar
from urllib.parse import urlsplit

from whet.types import JSON

T = TypeVar("T")

MAX_REPLY_BYTES = 2**22
MAX_BACKOFF_S = 30.0
_RETRIED_STATUS = (408, 409, 425, 429)
"""Besides all from 500 on: what may be better the next time."""


class HttpFailure(Exception):
    """One request failed. `final`: it would fail again."""

    def __init__(self, message: str, *, final: bool = False, timeout: bool = False) -> None:
        super().__init__(message)
        self.final, self.timeout = final, timeout


class RequestFailed(Exception):
    """A server could not be asked. The text says how it failed."""


class RequestLate(RequestFailed, TimeoutError):
    """A server did not answer in time."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Number of attempts, and waits between them."""

    attempts: int = 10
    backoff_s: float = 1.0
    """Before the second attempt; doubled each time up to 30 s, with up to as much again by chance."""


class JsonClient:
    """Posts JSON to one address. Each request runs in a thread of its own, whose socket is cut at the deadline.

    Args:
        url: the address.
        timeout_s: seconds of one attempt.
        max_concurrent: requests under way at once.
        headers: further headers.
        failed: error of a request that failed for good.
        late: error of one whose last attempt met the deadline.

    Raises:
        ValueError: the address is not http or https.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        max_concurrent: int,
        headers: Mapping[str, str] | None = None,
        *,
        failed: type[Exception] = RequestFailed,
        late: type[Exception] = RequestLate,
    ) -> None:
        self._failed, self._late = failed, late
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server; write http://HOST:PORT/PATH")
        self._url, self._parts, self._timeout_s = url, parts, timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="whet-http")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._open: set[_Line] = set()
        self._closed = False

    async def post(self, payload: JSON, read: Callable[[JSON], T], retries: Retries, what: str) -> T:
        """The answer as read by `read`, after as many attempts as necessary. `read` raises ValueError
        for an unusable answer.

        Raises `late` if the last attempt's deadline passed, `failed` if it failed otherwise; both say how.
        """
        body = json.dumps(payload).encode()
        for attempt in range(1, retries.attempts + 1):
            if self._closed:
                break
            try:
                return read(await self._post_once(body))
            except ValueError as error:
                failure = HttpFailure(f"it answered what cannot be used: {error}")
            except HttpFailure as error:
                failure = error
            if self._closed:
                break
            if failure.final or attempt == retries.attempts:
                kind = self._late if failure.timeout else self._failed
                raise kind(f"{what}: {self._url}: {failure} (attempt {attempt} of {retries.attempts})") from failure
            wait_s = min(retries.backoff_s * 2 ** (attempt - 1), MAX_BACKOFF_S)
            await asyncio.sleep(wait_s * (1 + random.random()))
        raise self._failed(f"{what}: the reward is closed")

    def close(self) -> None:
        """Cut the requests that are under way and end the threads."""
        self._closed = True
        for line in list(self._open):
            line.cut()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _post_once(self, body: bytes) -> JSON:
        line = _Line(self._connection())
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._exchange, line, body)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.cancel()
            line.cut()
            raise

    def _connection(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._tls is not None:
            return HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        return HTTPConnection(host, port, timeout=self._timeout_s)

    def _exchange(self, line: _Line, body: bytes) -> JSON:
        """Runs in a thread: one request, cut by a timer at the deadline however slowly bytes trickle in."""
        timer = threading.Timer(self._timeout_s, line.cut)
        timer.daemon = True
        self._open.add(line)
        timer.start()
        try:
            path = self._parts.path or "/"
            line.connect()
            line.connection.request("POST", f"{path}?{self._parts.query}" if self._parts.query else path, body, self._headers)
            return _read(line.connection.getresponse())
        except (OSError, HTTPException, HttpFailure) as error:
            if line.is_cut or isinstance(error, TimeoutError):
                raise HttpFailure(f"it did not answer within {self._timeout_s:g} s", timeout=True) from None
            raise error if isinstance(error, HttpFailure) else HttpFailure(f"{type(error).__name__}: {error}") from error
        finally:
            timer.cancel()
            self._open.discard(line)
            line.connection.close()


def _read(response: HTTPResponse) -> JSON:
    data = response.read(MAX_REPLY_BYTES + 1)
    shown = data[:200].decode("utf-8", "replace")
    if response.status >= 400:
        final = response.status < 500 and response.status not in _RETRIED_STATUS
        raise HttpFailure(f"it answered {response.status} {response.reason}: {shown!r}", final=final)
    if response.status >= 300:
        raise HttpFailure(f"it answered {response.status} {response.reason}; give the address that it leads to", final=True)
    if len(data) > MAX_REPLY_BYTES:
        raise HttpFailure(f"its answer is longer than {MAX_REPLY_BYTES} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise HttpFailure(f"its answer is not JSON: {shown!r}") from None


class _Line:
    """A connection that another thread can cut, at any moment of its use."""

    def __init__(self, connection: HTTPConnection) -> None:
        self.connection = connection
        self.is_cut = False
        self._socket: socket.socket | None = None  # the connection forgets it while its answer is still being read
        self._lock = threading.Lock()

    def connect(self) -> None:
        self.connection.connect()
        with self._lock:
            self._socket = self.connection.sock
            if self.is_cut:
                raise TimeoutError

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    self._socket.shutdown(socket.SHUT_RDWR)


def bearer(variable: str | None) -> dict[str, str]:
    """The header with the key that an environment variable holds. Raises ValueError if it is not set."""
    if variable is None:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"the environment variable {variable} (api_key_env) is not set")
    return {"Authorization": f"Bearer {key}"}
