"""The recorder of a run: one loopback server, with a session for each program that is running."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvicorn

from whet.record.app import RecorderApp
from whet.record.session import Session
from whet.serve.connection import bounded
from whet.serve.server import address_of

MAX_CONNECTIONS = 4096
"""Open connections of all programs together."""


@dataclass(slots=True, eq=False)
class Recorder:
    """The server's address and its open sessions."""

    address: str
    """`http://127.0.0.1:PORT`"""
    texts: Executor
    """Thread that tokenizes texts."""
    sessions: dict[str, Session] = field(default_factory=dict[str, Session])
    """By key."""

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.address)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    @contextmanager
    def opened(self, session: Session) -> Iterator[str]:
        """Answer requests with a session's key, which is made here, until the end."""
        key = secrets.token_urlsafe(24)
        self.sessions[key] = session
        try:
            yield key
        finally:
            del self.sessions[key]


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the run's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def open_recorder() -> AsyncIterator[Recorder]:
    """Serve on a free loopback port of this machine."""
    texts = ThreadPoolExecutor(1, "recorded-texts")
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.bind(("127.0.0.1", 0))
        recorder = Recorder(address_of(bound), texts)
        settings = uvicorn.Config(
            RecorderApp(recorder.sessions.get),
            http=bounded(MAX_CONNECTIONS),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        server = _Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[bound]), name="recorder")
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(0.01)
            yield recorder
        finally:
            server.should_exit = True
            await asyncio.wait({serving}, timeout=10.0)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    finally:
        bound.close()
        texts.shutdown(wait=False)
