"""One program from its start to its end: its output, its limits, and the end of all that it started."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from whet.env.sandbox.inside.rooms import Surroundings
from whet.env.sandbox.inside.start import Started, start
from whet.env.sandbox.inside.tree import ProcessTree, reap

LOOK_S = 0.05
"""Between two looks at what the processes take."""
FLOOD_BYTES = 32 << 20
"""Output after which a program is ended; what is over the limit is thrown away until then."""
DRAIN_S = 2.0
"""For output that is still in the pipes after the end."""


class StartFailed(Exception):
    """A program's surroundings could not be made. The text says why."""


class ProgramWatch:
    """Runs one program and says how it ended.

    Args:
        room: the program's surroundings.
        request: as `start` takes it, and `output_bytes`, `timeout_s` (None: none).
        caller: connection to the caller; when it closes, the program ends.
    """

    def __init__(self, room: Surroundings, request: Mapping[str, Any], caller: socket.socket) -> None:
        self._room, self._request, self._caller = room, request, caller
        self._tree = ProcessTree(room.proc)
        self._selector = selectors.DefaultSelector()
        self._kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._seen = dict.fromkeys(self._kept, 0)
        self._status: int | None = None
        self._first = 0
        """The process that `start` made."""
        self._given = memoryview(b"")

    def run(self, given: bytes | None, descriptors: list[int]) -> tuple[dict[str, Any], bytes, bytes]:
        """The outcome, and what the program wrote.

        Args:
            given: the program's standard input; None: it has the `descriptors` for input, output and error output.
            descriptors: see above; closed here.

        Raises:
            StartFailed: it could not be started.
        """
        began = time.monotonic()
        ends = descriptors if given is None else self._pipes(given)
        started = start(self._room, self._request, (ends[0], ends[1], ends[2]))
        self._first = started.pid
        for end in ends:
            os.close(end)
        self._selector.register(started.handle, selectors.EVENT_READ, "ended")
        self._selector.register(self._caller, selectors.EVENT_READ, "caller")
        reason = self._until_end(began)
        self._end(started)
        self._drain()
        self._raise_fault(started)
        if self._room.over():
            self._room.empty()
            reason = "disk"
        seconds = time.monotonic() - began
        limit = self._request["output_bytes"]
        cut = {name: seen > limit for name, seen in self._seen.items()}
        outcome = {"reason": reason, "status": self._status if reason == "exit" else None, "seconds": seconds, "cut": cut}
        return outcome, bytes(self._kept["stdout"]), bytes(self._kept["stderr"])

    def _pipes(self, given: bytes) -> list[int]:
        read, write = os.pipe()
        ends = [read]
        if given:
            os.set_blocking(write, False)
            self._given = memoryview(given)
            self._selector.register(write, selectors.EVENT_WRITE, "stdin")
        else:
            os.close(write)
        for name in self._kept:
            read, write = os.pipe()
            os.set_blocking(read, False)
            self._selector.register(read, selectors.EVENT_READ, name)
            ends.append(write)
        return ends

    def _until_end(self, began: float) -> str:
        """The reason for the end."""
        limit = self._request["timeout_s"]
        deadline = None if limit is None else began + limit
        look = began + LOOK_S
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return "time"
            if now >= look:
                if (reason := self._over()) is not None:
                    return reason
                look = time.monotonic() + LOOK_S
            wait = min(look, deadline or look) - time.monotonic()
            for key, _ in self._selector.select(max(0.0, wait)):
                if key.data == "ended":
                    return "exit"
                if key.data == "caller":
                    return "cancelled"
                self._move(key)
            if max(self._seen.values()) > FLOOD_BYTES:
                return "output"

    def _move(self, key: selectors.SelectorKey) -> None:
        """Move bytes of one pipe."""
        assert isinstance(key.fd, int)
        if key.data == "stdin":
            with suppress(BlockingIOError):
                try:
                    self._given = self._given[os.write(key.fd, self._given[:65536]) :]
                except BrokenPipeError:
                    self._given = memoryview(b"")
            if not self._given:
                self._close(key)
            return
        with suppress(BlockingIOError):
            data = os.read(key.fd, 65536)
            kept = self._kept[key.data]
            kept += data[: max(0, self._request["output_bytes"] - len(kept))]
            self._seen[key.data] += len(data)
            if not data:
                self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        os.close(key.fd)

    def _over(self) -> str | None:
        """The limit that all processes together are over, if any."""
        self._reap()
        pids = list(self._tree.below(os.getpid()))
        memory = self._request["memory_mb"] << 20
        if self._tree.memory(pids, memory) > memory:
            return "memory"
        if len(pids) > self._request["max_processes"] + 1:
            return "processes"
        return "disk" if self._room.over() else None

    def _end(self, started: Started) -> None:
        """End all that runs, and learn the program's status."""
        if self._room.in_namespaces:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(started.handle, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(started.pid, 0)
            assert started.status is not None
            text = os.read(started.status, 64)
            self._status = int(text) if text else None
            return
        self._reap()
        self._tree.end_below(os.getpid())

    def _reap(self) -> None:
        if self._room.in_namespaces:
            return
        if (status := reap().get(self._first)) is not None:
            self._status = os.waitstatus_to_exitcode(status)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            keys = [key for key in self._selector.get_map().values() if key.data in self._kept]
            if not keys:
                return
            ready = select.select([key.fd for key in keys], [], [], 0)[0]
            if not ready:
                return
            for key in keys:
                if key.fd in ready:
                    self._move(key)

    def _raise_fault(self, started: Started) -> None:
        if select.select([started.fault], [], [], 0)[0] and (text := os.read(started.fault, 4096)):
            raise StartFailed(text.decode(errors="replace"))
