"""Start and supervision of a worker's process on any machine. Messages to it go over a connection, the
same for all.

A local worker gets one end of a socket pair; one that is started elsewhere dials back (`dialing.py`).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import IO, Protocol

from whet.engine.base import EngineFailed
from whet.engine.workers.setup import Setup
from whet.observe.display import printable
from whet.runfolder.child_environment import child_environment
from whet.runfolder.stacks import SAY_HELD_STACKS, SAY_STACKS, STACK_MARK, TIMEOUT_S, spied

HERE = socket.gethostname()
"""This machine, as others call it."""
LOOPBACK = "127.0.0.1"
LAST_LINES = 400
"""Number of lines of a worker's output that are kept."""
QUIET_S = 0.2
"""Seconds without output after which a worker has nothing to add."""
LOOK_S = 0.2
"""Between two looks at whether a worker that starts is still waited for."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit status of a process."""

    code: int
    """Its exit status; negative: the signal that killed it."""

    @property
    def words(self) -> str:
        return f"killed by signal {-self.code}" if self.code < 0 else f"exit status {self.code}"


class WorkerProcess(Protocol):
    """A worker's process, wherever it runs."""

    @property
    def host(self) -> str:
        """The machine that it runs on: `HERE`, if it is this one."""
        ...

    def ended(self, timeout_s: float) -> ExitStatus | None:
        """Its exit status, after a wait of at most `timeout_s`; None: it still runs."""
        ...

    def kill(self) -> None:
        """End it now, stopped or not. One that has ended stays as it is."""
        ...

    def stacks(self, *, lost: bool) -> str:
        """Stacks of its threads, if it can still report them; empty if it has ended, or its output goes
        elsewhere. With `lost` it is killed next, so the request may crash it."""
        ...

    def last_lines(self) -> list[str]:
        """Its last lines of output, the newest last; empty if its output goes elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """A worker that was started."""

    connection: Connection
    process: WorkerProcess


class Launcher(Protocol):
    """Starts workers."""

    @property
    def address(self) -> str:
        """This machine's, as workers know it."""
        ...

    def start(self, name: str, setup: Setup, pipes: Sequence[socket.socket] = (), *, given_up: threading.Event) -> Link:
        """Start one and tell it its setup; it answers when it is ready.

        Args:
            name: in errors, and before each line that it says.
            setup: its parameters.
            pipes: pipes that it inherits, as `setup.links` names them: where several ranks are one copy.
            given_up: set when nobody waits for it any more.

        Raises:
            EngineFailed: if it cannot be started, or was given up before it was.
        """
        ...


class Words:
    """Output of a worker, line by line. Stacks go to the caller of `stacks`, everything else to
    standard error after the worker's name; the last lines are kept.

    Args:
        name: name of the worker.
    """

    def __init__(self, name: str) -> None:
        self._name, self._last = name, deque[str](maxlen=LAST_LINES)
        self._stacks = SimpleQueue[str]()
        self._heard: list[str] | None = None
        self.muted = False
        """Nothing is printed any more."""
        self._asking = threading.Lock()

    @property
    def last(self) -> list[str]:
        return list(self._last)

    def hear(self, line: str) -> None:
        line, mark, stack = line.partition(STACK_MARK)  # other words may not have come to the end of their line
        if mark:
            self._stacks.put(stack)
        if not line:  # nor does an empty line tell anything
            return
        self._last.append(line)
        if (heard := self._heard) is not None:
            heard.append(line)
        if self.muted:
            return
        with suppress(OSError, ValueError):  # this process may be about to end, and its output closed
            print(f"[{self._name}] {printable(line)}", file=sys.stderr, flush=True)

    def stacks(self, ask: Callable[[], object]) -> str:
        """Stacks that the worker reports after `ask`; empty if it reports none in time."""
        lines = list[str]()
        with self._asking:
            while not self._stacks.empty():  # what came too late for who asked before
                self._stacks.get()
            ask()
            deadline = time.monotonic() + TIMEOUT_S
            with suppress(Empty):
                while line := self._stacks.get(timeout=max(0.0, deadline - time.monotonic())):
                    lines.append(line)
        return "\n".join(lines)

    def held_stacks(self, ask: Callable[[], object]) -> str:
        """All that it says when it is asked, until it says no more."""
        with self._asking:
            heard = self._heard = list[str]()
            ask()
            deadline, seen = time.monotonic() + TIMEOUT_S, -1
            while time.monotonic() < deadline and (not heard or len(heard) > seen):
                seen = len(heard)
                time.sleep(QUIET_S)
            self._heard = None
        return "\n".join(heard)


class LocalWorker:
    """A child of this process. What it says goes to standard error, each line after its name, and the last lines are kept.

    Args:
        name: name of the worker.
        child: whose output and errors are one pipe (`stdout=PIPE, stderr=STDOUT`).
    """

    host = HERE

    def __init__(self, name: str, child: subprocess.Popen[bytes]) -> None:
        self.child, self._words = child, Words(name)
        self._pump = threading.Thread(target=self._read, name=f"whet {name} output", daemon=True)
        self._pump.start()

    def ended(self, timeout_s: float) -> ExitStatus | None:
        try:
            return ExitStatus(self.child.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.child.kill()

    def stacks(self, *, lost: bool) -> str:
        if self.child.poll() is not None:
            return ""
        return (
            self._words.stacks(lambda: self.child.send_signal(SAY_STACKS))
            or spied(self.child.pid)
            or (self._words.held_stacks(lambda: self.child.send_signal(SAY_HELD_STACKS)) if lost else "")
        )

    def mute(self) -> None:
        """Print nothing of it any more."""
        self._words.muted = True

    def last_lines(self) -> list[str]:
        if self.child.poll() is not None:
            self._pump.join(1.0)  # its last output may still be in the pipe
        return self._words.last

    def _read(self) -> None:
        output: IO[bytes] | None = self.child.stdout
        assert output is not None, "a worker was started without a pipe for its output"
        with output:
            for raw in output:
                self._words.hear(raw.decode(errors="replace").rstrip("\n"))


class LocalLauncher:
    """Starts workers as children of this process, on this machine."""

    address = LOOPBACK

    def start(self, name: str, setup: Setup, pipes: Sequence[socket.socket] = (), *, given_up: threading.Event) -> Link:
        mine, theirs = socket.socketpair()
        environment = child_environment({"OMP_NUM_THREADS": str(setup.threads)})
        if sys.platform == "linux":  # ranks of one machine need no other way to each other
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        given = [theirs.fileno(), *(pipe.fileno() for pipe in pipes)]
        with theirs:
            arguments = [sys.executable, "-m", "whet.engine.workers.worker", str(theirs.fileno())]
            child = subprocess.Popen(
                arguments, pass_fds=given, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        return send_setup(Link(Connection(mine.detach()), LocalWorker(name, child)), setup)


def send_setup(link: Link, setup: Setup) -> Link:
    """Send a worker its setup. One on another machine gets its first weights over its connection.

    Raises:
        EngineFailed: if it is to share memory with this machine's, and cannot.
    """
    if link.process.host != HERE:
        if setup.mapped:
            link.process.kill()
            raise EngineFailed(
                f"{setup.name} was placed on {link.process.host}, and new weights are to be put into the memory of {HERE}: set "
                f"sync.transport to broadcast, delta or disk, or give {HERE} room for all of the engine's processes"
            )
        setup = replace(setup, elsewhere=True)
    with suppress(OSError):  # a worker that is gone already is seen when it is waited for
        link.connection.send(setup)
    return link


def last_words(process: WorkerProcess, num_lines: int = 12) -> str:
    """The last lines of a process, for the end of an error."""
    lines = process.last_lines()[-num_lines:]
    return "\nits last output:\n    " + "\n    ".join(lines) if lines else ""
