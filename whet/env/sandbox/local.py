"""Sandboxes on this machine."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.env.sandbox.base import MAX_NAMES, OUTPUT_BYTES, READ_BYTES, Executed, PathRefused, SandboxFailed, SandboxProgram, text
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.forward import Forward
from whet.env.sandbox.holder import Holder, Launch

MAX_FILES = 4096
"""Files and folders in a trajectory's folder."""
ANSWER_S = 30.0
"""For a call to be answered after its time is over, and for files to be read and written."""
MAX_ARGUMENT_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Rung:
    """A way to isolate programs on this machine."""

    name: str
    """namespaces, landlock or unsafe."""
    python: str
    """Interpreter of the programs."""
    readable: tuple[str, ...] = ()
    """Files and folders that programs may read in addition to the system's own folders."""
    launch: Launch = field(default_factory=Launch)


class LocalSandbox:
    """A folder and programs on this machine.

    Args:
        holder: the process that has the folder.
        rung: how programs are isolated.
        config: limits.
        forward: connections to the address that was granted.
    """

    def __init__(self, holder: Holder, rung: Rung, config: SandboxConfig, forward: Forward | None) -> None:
        self._holder, self._rung, self._config, self._forward = holder, rung, config, forward
        self.folder = holder.folder
        """The folder's path, as programs see it."""

    @classmethod
    async def open(
        cls, rung: Rung, config: SandboxConfig, *, paths: Sequence[str] = (), loopback: tuple[str, int] | None = None
    ) -> LocalSandbox:
        """Make a sandbox.

        Args:
            rung: how programs are isolated.
            config: limits.
            paths: files and folders that may be read in addition.
            loopback: host and port that programs reach as `127.0.0.1`, at the same port; None: no network.

        Raises:
            SandboxFailed: it cannot be made.
        """
        settings = {
            "rung": rung.name,
            "readable": [*rung.readable, *config.paths, *paths],
            "disk_mb": config.disk_mb,
            "max_files": MAX_FILES,
            "port": None if loopback is None else loopback[1],
            "parent": tempfile.gettempdir(),
        }
        holder = await Holder.start(settings, rung.launch)
        forward = None
        if holder.listener is not None and loopback is not None:
            forward = await Forward.start(holder.listener, loopback)
        return cls(holder, rung, config, forward)

    async def exec(
        self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> Executed:
        limit_s = timeout_s or self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s + ANSWER_S):
                head, parts = await self._holder.ask(self._request(command, env, limit_s), stdin)
        except TimeoutError as late:
            raise SandboxFailed(f"a sandbox did not answer {ANSWER_S:g} s after a call's time was over") from late
        return executed(head, *parts)

    async def spawn(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> SandboxProgram:
        """Start a long-lived program. It has the limits of a call but for time, and ends with the sandbox at the latest.

        Raises:
            PathRefused: an argument has a zero byte, or is too long.
        """
        request = {**self._request(command, env, None), "output_bytes": 0}
        pipes = [os.pipe() for _ in range(3)]
        theirs, mine = [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]
        ended = asyncio.create_task(self._ended(request, theirs), name=f"sandbox program {command[0]}")
        transports: list[asyncio.BaseTransport] = []
        try:
            await asyncio.sleep(0)  # a task that is cancelled before it begins closes nothing
            stdin = await _writer(mine.pop(0))
            transports.append(stdin.transport)
            stdout = await _reader(mine.pop(0), transports)
            stderr = await _reader(mine.pop(0), transports)
        except BaseException:  # also a cancellation: nobody else ends it
            ended.cancel()
            for descriptor in mine:
                os.close(descriptor)
            for transport in transports:
                transport.close()
            raise
        return SandboxProgram(stdin, stdout, stderr, ended, tuple(transports))

    async def _ended(self, request: Mapping[str, Any], descriptors: list[int]) -> Executed:
        head, parts = await self._holder.ask(request, b"", descriptors)
        return executed(head, *parts)

    async def read(self, path: str) -> bytes:
        head, parts = await self._file({"do": "read", "path": path, "max_bytes": READ_BYTES})
        if head["size"] > READ_BYTES:
            raise PathRefused(f"{path} has {head['size']} bytes, and {READ_BYTES} can be read at most")
        return parts[0]

    async def write(self, path: str, content: bytes) -> None:
        await self._file({"do": "write", "path": path, "file_mb": self._config.disk_mb}, content)

    async def list(self, path: str = ".") -> Sequence[str]:
        head, _ = await self._file({"do": "list", "path": path, "max_names": MAX_NAMES})
        return head["names"]

    async def close(self) -> None:
        if self._forward is not None:
            await self._forward.close()
        await self._holder.close()

    async def _file(self, request: Mapping[str, Any], content: bytes = b"") -> tuple[dict[str, Any], list[bytes]]:
        try:
            async with asyncio.timeout(ANSWER_S):
                head, parts = await self._holder.ask(request, content)
        except TimeoutError as late:
            raise SandboxFailed(f"a sandbox did not answer after {ANSWER_S:g} s") from late
        if "refused" in head:
            raise PathRefused(head["refused"])
        return head, parts

    def _request(self, command: Sequence[str], env: Mapping[str, str] | None, timeout_s: float | None) -> dict[str, Any]:
        config, folder = self._config, self.folder
        given = [self._rung.python if command[0] == "python" else command[0], *command[1:]]
        bad = next((one for one in given if "\0" in one or len(one.encode(errors="replace")) > MAX_ARGUMENT_BYTES), None)
        if bad is not None:
            raise PathRefused(f"an argument of {given[0]} has a zero byte, or more than {MAX_ARGUMENT_BYTES} bytes")
        own = {
            "PATH": f"{os.path.dirname(self._rung.python)}:/usr/local/bin:/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": f"{folder}/.tmp",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return {
            "do": "run",
            "command": given,
            "env": {**own, **(env or {})},
            "timeout_s": timeout_s,
            "memory_mb": config.memory_mb,
            "max_processes": config.max_processes,
            "file_mb": config.disk_mb,
            "output_bytes": OUTPUT_BYTES,
        }


def executed(head: Mapping[str, Any], stdout: bytes, stderr: bytes) -> Executed:
    """The outcome of a call, from a holder's answer."""
    if head["reason"] == "exit" and head["status"] is None:
        return Executed(text(stdout), text(stderr), None, "memory", head["seconds"])  # the kernel ended what watches over it
    cut = head["cut"]
    return Executed(text(stdout), text(stderr), head["status"], head["reason"], head["seconds"], cut["stdout"], cut["stderr"])


async def _reader(descriptor: int, transports: list[asyncio.BaseTransport]) -> asyncio.StreamReader:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0))
    transports.append(transport)
    return reader


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", 0))
    return asyncio.StreamWriter(transport, protocol, None, loop)
