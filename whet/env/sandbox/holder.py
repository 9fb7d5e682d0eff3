"""The starter's end of the process that holds one local sandbox (`inside/holder.py`)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.env.sandbox.base import SandboxFailed
from whet.env.sandbox.inside.holder import HEAD
from whet.env.sandbox.inside.paths import empty

WHET = str(Path(__file__).resolve().parents[2])
BOOT = (
    "import sys, types; whet = types.ModuleType('whet'); whet.__path__ = [sys.argv.pop(1)]; sys.modules['whet'] = whet; "
    "from whet.env.sandbox.inside.holder import main; main()"
)
"""Runs the holder without what `import whet` loads."""
START_S = 60.0
"""For a holder to be ready, and to be gone."""
SEND_S = 10.0


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts holders."""

    python: str = sys.executable
    before: tuple[str, ...] = ()
    """A command before it, such as one that gives up rights."""


class HolderRefused(SandboxFailed):
    """The kernel does not allow the room that was asked for. The text says what."""


class Holder:
    """A holder that is ready."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, ready: Mapping[str, Any], given: list[int]) -> None:
        self._process, self._control = process, control
        self.folder: str = ready["folder"]
        """The folder's path inside."""
        self.outside: str | None = ready["folder"] if ready["outside"] else None
        """Its path on this machine; None: it has none."""
        self.uid: int | None = ready["uid"]
        self.listener = socket.socket(fileno=given[0]) if given else None
        """Listens inside, at the granted port."""
        self.pid = process.pid

    @classmethod
    async def start(cls, settings: Mapping[str, Any], launch: Launch) -> Holder:
        """Start one and wait until it is ready.

        Raises:
            HolderRefused: the kernel does not allow something that it needs.
            SandboxFailed: it ended, or was not ready in time.
        """
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        with other:
            command = [*launch.before, launch.python, "-I", "-S", "-c", BOOT, WHET, str(other.fileno()), json.dumps(settings)]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"},
                    cwd="/", pass_fds=[other.fileno()], start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                control.close()
                raise SandboxFailed(f"a sandbox's process could not be started: {error}") from error
        try:
            async with asyncio.timeout(START_S):
                message, given = await _receive(control)
        except TimeoutError as late:
            await _end(process, control)
            raise SandboxFailed(f"a sandbox was not ready after {START_S:g} s") from late
        except BaseException:  # the task was cancelled: nothing of it may stay
            await asyncio.shield(_end(process, control))
            raise
        ready = json.loads(message) if message else {"fault": f"its process ended: {_last_words(process)}"}
        if "fault" in ready:
            await _end(process, control)
            raise (HolderRefused if message else SandboxFailed)(ready["fault"])
        return cls(process, control, ready, given)

    async def ask(
        self, request: Mapping[str, Any], content: bytes = b"", descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to a request: its head and what follows it. If the waiting is cancelled, what was asked for ends.

        Args:
            request: see `inside/holder.py`.
            content: bytes that follow it.
            descriptors: a program's input, output and error output; closed here once the holder has them.

        Raises:
            SandboxFailed: the holder is gone, or could not do it.
        """
        try:
            mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with other:
                try:
                    await self._send([other.fileno(), *descriptors])
                except BaseException:  # also a cancellation: nobody else closes this end
                    mine.close()
                    raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        reader, writer = await asyncio.open_connection(sock=mine)
        try:
            text = json.dumps({**request, "size": len(content)}).encode()
            writer.write(HEAD.pack(len(text)) + text + content)
            head = json.loads(await reader.readexactly(HEAD.unpack(await reader.readexactly(HEAD.size))[0]))
            parts = [await reader.readexactly(size) for size in head["sizes"]]
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxFailed("a sandbox's process ended in the midst of a call") from error
        finally:
            writer.close()
        if "fault" in head:
            raise SandboxFailed(f"a sandbox could not run a call: {head['fault']}")
        return head, parts

    async def _send(self, descriptors: list[int]) -> None:
        deadline = asyncio.get_running_loop().time() + SEND_S
        while True:
            try:
                socket.send_fds(self._control, [b"x"], descriptors)
                return
            except BlockingIOError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise SandboxFailed("a sandbox's process takes no calls") from error
                await asyncio.sleep(0.005)
            except OSError as error:
                ended = error.errno in (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN)
                raise SandboxFailed(f"a sandbox's process {'is gone' if ended else f'cannot be reached: {error}'}") from error

    async def close(self) -> None:
        """End everything in the sandbox, and remove its folder."""
        if self.listener is not None:
            self.listener.close()
        await _end(self._process, self._control)
        if self.outside is not None and os.path.isdir(self.outside):  # the holder was killed
            await asyncio.to_thread(_remove, self.outside)


async def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(control, ready.set)
    try:
        await ready.wait()
        message, given, _, _ = socket.recv_fds(control, 1 << 16, 1)
        return message, given
    except ConnectionResetError:
        return b"", []
    finally:
        loop.remove_reader(control)


async def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Close the holder's socket, and wait until it is gone."""
    control.close()
    loop = asyncio.get_running_loop()
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        ended = asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            async with asyncio.timeout(START_S):
                await ended.wait()
        except TimeoutError:
            process.kill()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _last_words(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"status {process.wait()}"


def _remove(folder: str) -> None:
    """Remove a folder whose holder was killed."""
    with suppress(FileNotFoundError):
        empty(folder)
        shutil.rmtree(folder)
