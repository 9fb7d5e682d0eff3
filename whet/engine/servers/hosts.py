"""The machines that servers are started on, and the processes there."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from whet.engine.servers import guard
from whet.engine.servers.devices import VISIBLE
from whet.engine.servers.member import ServerProcess
from whet.engine.workers.launch import LocalWorker
from whet.runfolder.child_environment import child_environment
from whet.runfolder.stacks import spied

LOOPBACK = "127.0.0.1"
WATCH_S = 0.2
END_S = 15.0
"""For a server to end by itself."""


class StartedProcess(ServerProcess, Protocol):
    """The process of a server that was started, wherever it runs."""

    @property
    def ended(self) -> str | None:
        """The manner of its end; None: it runs."""
        ...

    def last_lines(self) -> list[str]:
        """Its last lines of output, the newest last."""
        ...


class ServerHost(Protocol):
    """A machine that a server is started on."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        ...

    @property
    def address(self) -> str:
        """Address on which the server listens, and is reached from here; `LOOPBACK`: it is this machine."""
        ...

    @property
    def node_address(self) -> str:
        """Address by which other nodes reach it."""
        ...

    def find(self, program: str) -> str | None:
        """Path of a program there; None: there is none."""
        ...

    def free_port(self, address: str) -> int:
        """A port of one of its addresses on which nobody listens."""
        ...

    def lacks(self, path: Path) -> bool:
        """True if a file or folder of this machine is not there."""
        ...

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> StartedProcess:
        """Start a server.

        Args:
            name: before each line of its output.
            command: a Python there, and its arguments.
            environment: variables in addition to those that any process of a run has.

        Raises:
            EngineFailed: if it cannot be started.
        """
        ...

    def close(self) -> None:
        """Give up a host on which no server runs."""
        ...


ServerHosts = Callable[[str, threading.Event], ServerHost]
"""Finds the host of a server, by its name, each time that it is started. Raises EngineFailed if there is none, or the event is set: nobody
waits for it any more."""


@dataclass(frozen=True, slots=True)
class LocalHost:
    """This machine."""

    devices: tuple[str, ...] = ()
    """GPUs of the server; empty: those of this process."""
    title = "this machine"
    address = node_address = LOOPBACK

    def find(self, program: str) -> str | None:
        return shutil.which(program)

    def free_port(self, address: str) -> int:
        return free_port()

    def lacks(self, path: Path) -> bool:
        return not path.exists()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> StartedServer:
        devices = {VISIBLE: ",".join(self.devices)} if self.devices else {}
        return StartedServer(name, command, {**environment, **devices})

    def close(self) -> None:
        pass


def local_host(name: str, given_up: threading.Event) -> LocalHost:
    """This machine, with the GPUs of this process, for every server (`ServerHosts`)."""
    return LocalHost()


class StartedServer:
    """A server's process, and its engine's.

    Args:
        name: before each line of its output.
        command: a Python, and its arguments.
        environment: variables in addition to those that any process of a run has.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        guarded = [command[0], guard.__file__, *command]
        child = subprocess.Popen(
            guarded, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment(environment)
        )
        self._child, self._worker = child, LocalWorker(name, child)

    @property
    def ended(self) -> str | None:
        """The manner of its end; None: it runs."""
        status = self._worker.ended(0)
        return None if status is None else status.words

    def last_lines(self) -> list[str]:
        return self._worker.last_lines()

    def stacks(self) -> str:
        return "" if self._child.poll() is not None else spied(self._child.pid)

    def kill(self) -> None:
        """End it, and its engine. Any thread."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def stop(self) -> None:
        self._worker.mute()  # its last words are of its own threads
        self.kill()


class ProcessesOfNodes:
    """The processes of a server on several nodes, as one (`StartedProcess`).

    When one of them ends, all others are ended: without it a server may still answer, and never compute again.
    """

    def __init__(self, processes: Sequence[StartedProcess]) -> None:
        self._processes = processes
        self._lost: StartedProcess | None = None
        self._lock, self._over = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, name="server nodes", daemon=True).start()

    @property
    def ended(self) -> str | None:
        """The manner of the end of the first that ended; None: all run."""
        lost = self._first_ended()
        return None if lost is None else lost.ended

    def last_lines(self) -> list[str]:
        """The last lines of the first that ended; while all run, of the one that answers."""
        return (self._first_ended() or self._processes[0]).last_lines()

    def stacks(self) -> str:
        return "\n".join(filter(None, (process.stacks() for process in self._processes)))

    def kill(self) -> None:
        self._over.set()
        for process in self._processes:
            process.kill()

    def stop(self) -> None:
        self._over.set()
        for process in self._processes:
            process.stop()

    def _first_ended(self) -> StartedProcess | None:
        with self._lock:
            if self._lost is None:
                self._lost = next((process for process in self._processes if process.ended is not None), None)
            return self._lost

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            if self._first_ended() is not None:
                self.kill()


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])
