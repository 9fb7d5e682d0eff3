"""The actor's object: it starts one process on its node, reads its output, and ends with it. It does not import
torch.

Its calls are Ray's own, with their deadlines, and errors that carry the actor's traceback.
"""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from whet.cluster.process import Command, LocalProcess, ProcessEvent

POLL_S = 5.0
"""Seconds that `next` waits for an event."""


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """Place of an actor in a cluster."""

    host: str
    """Name of the machine."""
    node: str
    """Ray's name of the node."""
    address: str
    """Address by which the cluster knows the node."""
    gpus: str = ""
    """GPUs that Ray gave to the actor, as CUDA_VISIBLE_DEVICES names them."""


class Agent:
    """Starts a process where the actor is. Methods are called by several threads."""

    def __init__(self) -> None:
        self._events = SimpleQueue[ProcessEvent]()
        self._process: LocalProcess | None = None

    def place(self) -> ActorPlace:
        import ray

        context = ray.get_runtime_context()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return ActorPlace(socket.gethostname(), context.get_node_id(), ray.util.get_node_ip_address(), gpus)

    def find(self, program: str) -> str | None:
        """Path of a program on the node; None: there is none."""
        return shutil.which(program)

    def exists(self, path: str) -> bool:
        """True if the node has the file or folder."""
        return os.path.exists(path)

    def free_port(self, address: str) -> int:
        """A port of one of the node's addresses on which nobody listens.

        Raises:
            OSError: if it is no address of the node's.
        """
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            return int(listener.getsockname()[1])

    def start(self, command: Command) -> str:
        """Start it, once. Returns its name in errors."""
        assert self._process is None, "an agent starts one process"
        self._process = LocalProcess(command, self._events.put)
        return f"process {self._process.pid} on {socket.gethostname()}"

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
