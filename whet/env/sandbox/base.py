"""The sandbox seam: commands and files in an isolated folder, here or elsewhere."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

OUTPUT_BYTES = 64 << 10
"""Kept of each of a command's two outputs."""
READ_BYTES = 1 << 20
"""Read of a file."""
MAX_NAMES = 1000
"""Listed of a folder."""
REASONS = {
    "time": "it was ended: its time was over",
    "memory": "it was ended: it took too much memory",
    "processes": "it was ended: it started too many processes",
    "output": "it was ended: it wrote too much output",
    "disk": "it was ended, and the folder emptied: it wrote too much to the disk",
}
"""Why a command was ended, in words for the model."""


class SandboxFailed(RuntimeError):
    """A sandbox itself failed, and not what ran in it. It makes the trajectory an environment error."""


class SandboxRefused(ValueError):
    """Nothing on this machine isolates as it must. The text says what is missing."""


class PathRefused(ValueError):
    """A path cannot be read or written. The text is an answer for the model."""


@dataclass(frozen=True, slots=True)
class Executed:
    """A command that ended, by itself or otherwise."""

    stdout: str
    stderr: str
    status: int | None
    """Exit status, negative for a signal; None: it was ended, as `reason` says."""
    reason: str = "exit"
    """`exit`, or a key of `REASONS`."""
    seconds: float = 0.0
    stdout_cut: bool = False
    """True if more was written than is kept."""
    stderr_cut: bool = False

    def __post_init__(self) -> None:
        if (self.status is None) != (self.reason != "exit") or (self.reason != "exit" and self.reason not in REASONS):
            raise ValueError(f"a command that ended by {self.reason!r} cannot have the status {self.status}")


@runtime_checkable
class Sandbox(Protocol):
    """An isolated folder and the commands that run in it. Calls may run side by side."""

    async def exec(
        self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> Executed:
        """Run a command to its end, and end all that it started.

        Args:
            command: a program and its arguments; `python` is the sandbox's own interpreter.
            stdin: standard input.
            timeout_s: seconds that it may take; None: those of the settings.
            env: variables in addition to those that every command has.

        Raises:
            SandboxFailed: the sandbox failed, and not the command.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Content of a file, `READ_BYTES` at most.

        Raises:
            PathRefused: there is no such file, it is a link or no ordinary file, or it is outside of the folder.
            SandboxFailed: the sandbox failed.
        """
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Write a file. Folders on its way are made. Raises as `read`."""
        ...

    async def list(self, path: str = ".") -> Sequence[str]:
        """Names in a folder, sorted, those of folders with `/` at their end. Raises as `read`."""
        ...

    async def close(self) -> None:
        """End all that runs, and remove the folder."""
        ...


@dataclass(frozen=True, slots=True)
class SandboxProgram:
    """A long-lived program in a sandbox: an agent, or a server that speaks over its pipes."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    ended: asyncio.Task[Executed]
    """Done when it has ended, with its status and without its output. Cancelling it ends the program."""
    transports: tuple[asyncio.BaseTransport, ...] = ()
    """Transports of the pipes."""

    async def close(self) -> None:
        """End the program, if it runs, and close the pipes."""
        self.ended.cancel()
        await asyncio.gather(self.ended, return_exceptions=True)
        for transport in self.transports:
            transport.close()


def encoded(content: bytes) -> str:
    """Bytes as base64."""
    return base64.b64encode(content).decode()


def text(content: bytes) -> str:
    """Output as text; what is no UTF-8 is marked."""
    return content.decode("utf-8", errors="replace")
