"""A client's connection: time limits for its request and its reading of the answer, and a limit on the
number of connections."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from whet.serve.errors import ApiError

HEAD_TIMEOUT_S = 20.0
"""For a request's line and headers, from when the connection was made or the answer before was sent."""
LINGER_S = 30.0
"""For a client to take the rest of what it was sent, once the connection is closed from here."""
MORE_CONNECTIONS = 256
"""Than samples may run and wait: for requests of control, and for clients that keep theirs."""


class BoundedConnection(H11Protocol):
    """uvicorn's connection with deadlines, a limit on their number, and errors in the shape of all others."""

    most = 0
    """Connections at a time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._head: asyncio.TimerHandle | None = None
        super().connection_made(Lingering(transport, self.loop))  # pyright: ignore[reportArgumentType]
        if len(self.connections) > self.most:
            full = ApiError(503, f"{self.most} connections are open, which is the limit", code="server_full", retry_after_s=1)
            self._refuse(full)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is no HTTP once, unless an answer has started already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            words = f"{msg} It is no HTTP/1.1, or its line and headers are over the limit of 64 KiB"
            self._refuse(ApiError(400, words, code="invalid_http"))
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error.to_dict()).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers += error.headers.items()
        for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


class Lingering:
    """A transport that does not wait for ever, once it is closed, for its other end to take what was written.

    Args:
        transport: asyncio's.
        loop: its event loop.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop

    def close(self) -> None:
        left = not self._transport.is_closing() and self._transport.get_write_buffer_size() > 0
        self._transport.close()
        if left:
            self._loop.call_later(LINGER_S, self._transport.abort)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def bounded(most: int) -> type[BoundedConnection]:
    """A class of connections of which `most` may exist at a time."""
    return type("BoundedConnection", (BoundedConnection,), {"most": most})
