"""Connections from inside of a sandbox to one address outside of it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

MAX_CONNECTIONS = 64
"""At a time; further ones are closed."""
CONNECT_S = 10.0


class Forward:
    """Carries bytes between a listener in a sandbox's network and one address.

    Args:
        address: host and port.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, listener: socket.socket, address: tuple[str, int]) -> Forward:
        """Start to accept connections from a listening socket."""
        forward = cls(address)
        listener.setblocking(False)
        forward._server = await asyncio.start_server(forward._accept, sock=listener)
        return forward

    async def close(self) -> None:
        """End all connections."""
        assert self._server is not None
        self._server.close()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if len(self._running) <= MAX_CONNECTIONS:
                async with asyncio.timeout(CONNECT_S):
                    far_reader, far_writer = await asyncio.open_connection(*self._address)
                try:
                    await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))
                finally:
                    far_writer.close()
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the program inside sees its connection end
        finally:
            writer.close()
            self._running.discard(task)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
