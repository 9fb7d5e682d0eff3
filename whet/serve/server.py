"""The server's life: it binds, serves, and ends whole when it is asked to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from whet.serve.access import Guard, Keys, check_exposure, is_loopback
from whet.serve.app import make_app
from whet.serve.calls import ABORT_GRACE_S
from whet.serve.connection import MORE_CONNECTIONS, bounded
from whet.serve.service import Service
from whet.serve.settings import ServerLimits

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FILES_KEPT = 128
"""Files that a process keeps free from connections, of those that it may have open."""


def bind(host: str, port: int, keys: Keys) -> socket.socket:
    """A socket at an address.

    Raises:
        ValueError: the address is not to be had, or must not be without a key.
    """
    check_exposure(host, keys)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with port=N (0: any)") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """The URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def num_connections(limits: ServerLimits) -> int:
    """Largest number of open connections: one for each sample, as far as this process may have files
    open."""
    wanted = limits.max_running + limits.max_waiting + MORE_CONNECTIONS
    try:
        import resource
    except ImportError:  # no limit is known here
        return wanted
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - FILES_KEPT))


async def run_server(
    service: Service, bound: socket.socket, keys: Keys, ready: Callable[[Closing], None], app: ASGIApp | None = None
) -> None:
    """Serve until asked to end. Open requests then have `limits.shutdown_s` to finish; after that they
    are aborted with a message.

    Args:
        service: the service.
        bound: the socket to serve on.
        keys: keys that clients must send.
        ready: called once with the object that ends the server, as soon as it listens.
        app: the application in place of the service's own.
    """
    guard = Guard(app or make_app(service), keys, exposed=not is_loopback(service.config.host))
    grace_s = service.config.limits.shutdown_s
    settings = uvicorn.Config(
        guard,
        http=bounded(num_connections(service.config.limits)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(grace_s + 2 * ABORT_GRACE_S) + 1,
    )
    server = _Server(settings)
    closing = Closing(service, guard, server, grace_s)
    with _on_signals(closing):
        running = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not (server.started or running.done()):
            await asyncio.sleep(0.01)
        if server.started:
            ready(closing)
        try:
            await running
        finally:
            closing.end()


class Closing:
    """Ends a server. Its methods may be called from anywhere, signal handlers included."""

    def __init__(self, service: Service, guard: Guard, server: uvicorn.Server, grace_s: float) -> None:
        self._service, self._guard, self._server, self._grace_s = service, guard, server, grace_s
        self._loop = asyncio.get_running_loop()
        self._cut: asyncio.TimerHandle | None = None
        self._aborting: asyncio.Task[None] | None = None
        self.asked = False

    def ask(self) -> None:
        """Take no new request, and end when the open ones have."""
        self.asked = True
        self._loop.call_soon_threadsafe(self._begin)

    def end(self) -> None:
        """It has ended."""
        if self._cut is not None:
            self._cut.cancel()

    def _begin(self) -> None:
        self._guard.draining = True
        self._server.should_exit = True
        if self._cut is None:
            self._cut = self._loop.call_later(self._grace_s, self._abort)

    def _abort(self) -> None:
        self._aborting = self._loop.create_task(self._service.calls.abort_all("the server is shutting down"))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would end at the first signal with the requests' connections cut."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def _on_signals(closing: Closing) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the server, the second time at once. Outside the main thread Python has no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if closing.asked:
            os.write(sys.stderr.fileno(), f"{name} again: left at once\n".encode())
            os._exit(128 + number)
        closing.ask()  # before the words: a reader of them may send the next signal while this one is still handled
        os.write(sys.stderr.fileno(), f"{name}: open requests are finished first; once more ends it at once\n".encode())

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
