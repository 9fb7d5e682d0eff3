"""A server of tools over its pipes: its process, in a sandbox or with this process's rights, and its messages, a bounded line each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from whet.calls import keeper
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.open import open_local

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MAX_LINE_BYTES = 16 << 20
"""Longest line of a server."""
LAST_WORDS_BYTES = 2048
"""End of what a server writes to its errors that a report shows."""
LEAVE_S = 2.0
"""For a server to end once its input is closed."""
END_S = 15.0
"""For its keeper to end all that it started."""
LOOK_S = 0.01
"""Between two looks at whether a process has ended."""
WORDS_S = 1.0
"""For the last words of a server whose output has ended."""


class LineTooLong(Exception):
    """A server's line has no end within the limit."""


@dataclass(frozen=True, slots=True)
class CommandRoom:
    """A server's command as a sandbox runs it."""

    command: tuple[str, ...]
    """With the full path of its program."""
    paths: tuple[str, ...]
    """Files and folders that it must read to run."""
    config: SandboxConfig


@dataclass(slots=True)
class ServerPipes:
    """The pipes of a server that runs."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    fault: str = ""
    """The reason for which nothing more is read of it."""
    _words: bytearray = field(default_factory=bytearray)
    _reading: asyncio.Task[None] | None = None

    def last_words(self) -> str:
        """The fault of its output, or the end of what it wrote to its errors."""
        return self.fault or self._words.decode(errors="replace").strip()

    def listen(self) -> asyncio.Task[None]:
        """Begin to read its errors, so that it never waits for somebody who does."""
        self._reading = asyncio.create_task(self._read_errors(), name="errors of an MCP server")
        return self._reading

    async def at_end(self) -> None:
        """Wait for its last words, a while."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=WORDS_S)

    async def _read_errors(self) -> None:
        while data := await self.stderr.read(65536):
            self._words += data
            del self._words[:-LAST_WORDS_BYTES]


@asynccontextmanager
async def started(command: Sequence[str], environment: Mapping[str, str], room: CommandRoom | None) -> AsyncIterator[ServerPipes]:
    """A server that runs as long as the context, with all that it starts.

    Args:
        command: program and arguments.
        environment: its variables.
        room: the sandbox that it runs in; None: it has the rights of this process.

    Raises:
        OSError, SandboxFailed: it cannot be started.
    """
    async with _kept(command, environment) if room is None else _isolated(room, environment) as pipes:
        reading = pipes.listen()
        try:
            yield pipes
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def _isolated(room: CommandRoom, environment: Mapping[str, str]) -> AsyncIterator[ServerPipes]:
    async with open_local(room.config, paths=room.paths) as sandbox:
        program = await sandbox.spawn(room.command, environment)
        try:
            yield ServerPipes(program.stdin, program.stdout, program.stderr)
            program.stdin.close()
            await asyncio.wait({program.ended}, timeout=LEAVE_S)
        finally:
            await program.close()


@asynccontextmanager
async def _kept(command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[ServerPipes]:
    kept = [sys.executable, "-I", "-S", keeper.__file__, "-", *command]
    loop = asyncio.get_running_loop()
    process, streams = await loop.subprocess_exec(
        lambda: asyncio.subprocess.SubprocessStreamProtocol(1 << 16, loop), *kept, env=dict(environment), start_new_session=True
    )
    assert streams.stdin is not None and streams.stdout is not None and streams.stderr is not None
    try:
        yield ServerPipes(streams.stdin, streams.stdout, streams.stderr)
        streams.stdin.close()
        await _gone(process, LEAVE_S)
    finally:
        if process.get_returncode() is None:
            with suppress(ProcessLookupError):
                process.terminate()  # its keeper ends all that it started
            await asyncio.shield(_gone(process, END_S))
        process.close()  # kills a keeper that could not end all


async def _gone(process: asyncio.SubprocessTransport, seconds: float) -> None:
    """Wait for a process to end, even if another one still has its pipes open."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while process.get_returncode() is None and loop.time() < deadline:
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def messages(pipes: ServerPipes) -> AsyncIterator[TransportStreams]:
    """The transport of a session over the pipes: streams of messages from and to the server."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    found, finding = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sending, sent = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        async with found:
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the session is over
                try:
                    async for line in lines(pipes.stdout):
                        try:
                            message: Any = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                        except ValueError as error:  # the session deals with it
                            message = error
                        await found.send(message)
                except LineTooLong as error:
                    pipes.fault = str(error)
                await pipes.at_end()

    async def write() -> None:
        try:
            async with sent:
                async for message in sent:
                    pipes.stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await pipes.stdin.drain()
        except OSError:  # it may be alive and read nothing more: the session sees the end of the connection
            await found.aclose()

    async with found, finding, sending, sent, anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        try:
            yield finding, sending
        finally:
            tasks.cancel_scope.cancel()


async def lines(output: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of an output, but for empty ones.

    Raises:
        LineTooLong: one has more than `MAX_LINE_BYTES`.
    """
    rest = bytearray()
    while piece := await output.read(1 << 16):
        *whole, last = piece.split(b"\n")
        for end in whole:
            if line := bytes(rest + end).strip():
                yield line
            rest.clear()
        rest += last
        if len(rest) > MAX_LINE_BYTES:
            raise LineTooLong(f"it wrote a line of more than {MAX_LINE_BYTES >> 20} MiB")
