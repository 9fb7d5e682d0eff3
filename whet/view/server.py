"""The viewer's server: on loopback, at an address with a token of its own."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from whet.view.access import ViewerGuard
from whet.view.app import Viewer, make_app

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
"""Names that a browser on this machine asks for."""
MOST_CONNECTIONS = 64
IDLE_S = 30


def view(paths: Sequence[Path], port: int, ready: Callable[[str], None]) -> None:
    """Serve the runs until Ctrl-C.

    Args:
        paths: folders of runs.
        port: 0: one that is free.
        ready: called with the address once it can be opened.

    Raises:
        ValueError: a folder has no run, or the port is taken.
    """
    viewer = Viewer(paths)
    token = secrets.token_urlsafe(16)
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on {HOST}:{port}: {error.strerror}; choose another with --port N (0: any)") from error
    address = f"http://{HOST}:{bound.getsockname()[1]}/{token}/"
    server = _ViewerServer(ViewerGuard(make_app(viewer), token, NAMES), lambda: ready(address))
    server.run(sockets=[bound])


class _ViewerServer(uvicorn.Server):
    """A uvicorn server that says when it listens."""

    def __init__(self, app: ViewerGuard, ready: Callable[[], None]) -> None:
        limits = {"limit_concurrency": MOST_CONNECTIONS, "timeout_keep_alive": IDLE_S, "h11_max_incomplete_event_size": 32768}
        quiet = {"access_log": False, "log_level": "warning", "server_header": False}
        super().__init__(uvicorn.Config(app, http="h11", ws="none", lifespan="off", timeout_graceful_shutdown=1, **limits, **quiet))
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()
