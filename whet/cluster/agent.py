"""The actor's object: it starts one process on its node, hears it, and ends with it. It does not import
torch."""

from __future__ import annotations

import socket
from queue import Empty, SimpleQueue

from whet.cluster.process import Command, LocalProcess, ProcessEvent

POLL_S = 5.0
"""Seconds that `next` waits for an event."""


class Agent:
    """Starts a process where the actor is. Methods are called by several threads."""

    def __init__(self) -> None:
        self._events = SimpleQueue[ProcessEvent]()
        self._process: LocalProcess | None = None

    def host(self) -> str:
        return socket.gethostname()

    def node(self) -> str:
        """Ray's name of the node that it is on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def start(self, command: Command) -> int:
        """Start it, once. Returns its process id."""
        assert self._process is None, "an agent starts one process"
        self._process = LocalProcess(command, self._events.put)
        return self._process.pid

    def next(self) -> list[ProcessEvent]:
        """Events since the last call, after a wait for the first."""
        found: list[ProcessEvent] = []
        try:
            found.append(self._events.get(timeout=POLL_S))
            while True:
                found.append(self._events.get_nowait())
        except Empty:
            return found

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
