"""How a worker's process is started and watched, wherever it runs. What is said to it goes over a connection, the same for all.

A local worker gets one end of a socket pair. One that is started elsewhere is given an `Invitation` and dials back: both sides then
prove to each other that they have the invitation's key (the challenge of `multiprocessing.connection`, an HMAC), and only after that is
anything unpickled. The key is of one worker of one run, so whoever has it is part of the run, and pickles cross no trust boundary; it
travels with what starts the worker, never on a command line. Nothing is encrypted: listen on loopback, or on a network whose machines
are trusted.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import IO, TYPE_CHECKING, Protocol

from whet.engine.base import EngineFailed
from whet.runfolder.stacks import SAY_STACKS, TIMEOUT_S, spied

if TYPE_CHECKING:
    from whet.engine.embedded.worker import Setup

LAST_LINES = 100
"""Kept of what a worker said."""
HANDSHAKE_TIMEOUT_S = 10.0
"""For whoever dials in to prove who it is."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    code: int
    """Its exit status; negative: the signal that killed it."""

    @property
    def words(self) -> str:
        return f"killed by signal {-self.code}" if self.code < 0 else f"exit status {self.code}"


class Process(Protocol):
    """A worker's process, wherever it runs."""

    def ended(self, timeout_s: float) -> Ended | None:
        """How it ended, waited for at most so long; None: it goes on."""
        ...

    def kill(self) -> None:
        """End it now, stopped or not. One that has ended stays as it is."""
        ...

    def stacks(self) -> str:
        """Where its threads are, as far as it can still say so; empty where it has ended, or its words go elsewhere."""
        ...

    def last_lines(self) -> list[str]:
        """What it said last, the newest last; none where its words go elsewhere."""
        ...


@dataclass(frozen=True, slots=True)
class Link:
    """A worker that was started."""

    connection: Connection
    process: Process


class Launcher(Protocol):
    """Starts workers."""

    def start(self, name: str, setup: Setup, pipes: Sequence[socket.socket] = ()) -> Link:
        """Start one and tell it its setup; it answers when it is ready.

        Args:
            name: in errors, and before each line that it says.
            setup: what it is made of.
            pipes: that it inherits, as `setup.links` names them: where several ranks are one copy.

        Raises:
            EngineFailed: if it cannot be started.
        """
        ...


class Asked(Protocol):
    """A process whose lines are read here."""

    asked: list[str] | None
    """Where its lines go while it is asked for its stacks."""


@contextmanager
def asked_for_stacks(process: Asked) -> Iterator[list[str]]:
    """Ask it inside; afterwards the list has what it said, waited for until it says no more."""
    lines = process.asked = list[str]()
    try:
        yield lines
        deadline, seen = time.monotonic() + TIMEOUT_S, -1
        while time.monotonic() < deadline and (not lines or len(lines) > seen):
            seen = len(lines)
            time.sleep(0.2)
    finally:
        process.asked = None


class LocalProcess:
    """A child of this process. What it says goes to standard error, each line after its name, and the last lines are kept.

    Args:
        name: of the worker.
        child: whose output and errors are one pipe (`stdout=PIPE, stderr=STDOUT`).
    """

    def __init__(self, name: str, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self.asked: list[str] | None = None
        self._pump = threading.Thread(target=self._read, args=(name,), name=f"whet {name} output", daemon=True)
        self._pump.start()

    def ended(self, timeout_s: float) -> Ended | None:
        try:
            return Ended(self.child.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self.child.kill()

    def stacks(self) -> str:
        if self.child.poll() is not None:
            return ""
        with asked_for_stacks(self) as lines:
            self.child.send_signal(SAY_STACKS)
        return "\n".join(lines) or spied(self.child.pid)

    def last_lines(self) -> list[str]:
        if self.child.poll() is not None:
            self._pump.join(1.0)  # what it said as it ended may still be in the pipe
        return list(self._lines)

    def _read(self, name: str) -> None:
        output: IO[bytes] | None = self.child.stdout
        assert output is not None, "a worker was started without a pipe for what it says"
        with output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip("\n")
                if (asked := self.asked) is not None:
                    asked.append(line)
                    continue
                self._lines.append(line)
                with suppress(OSError, ValueError):  # this process may be about to end, and its output closed
                    print(f"[{name}] {line}", file=sys.stderr, flush=True)


class LocalLauncher:
    """Starts workers as children of this process, on this machine."""

    def start(self, name: str, setup: Setup, pipes: Sequence[socket.socket] = ()) -> Link:
        mine, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads)}
        if sys.platform == "linux":  # ranks of one machine need no other way to each other
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        given = [theirs.fileno(), *(pipe.fileno() for pipe in pipes)]
        with theirs:
            arguments = [sys.executable, "-m", "whet.engine.embedded.worker", str(theirs.fileno())]
            child = subprocess.Popen(
                arguments, pass_fds=given, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        return _told(Link(Connection(mine.detach()), LocalProcess(name, child)), setup)


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where a worker dials, and what it proves itself with."""

    host: str
    port: int
    key: bytes = field(repr=False)

    def accept(self) -> Connection:
        """Dial, from the worker's side, and prove to each other who one is.

        Raises:
            OSError: if nobody listens there any more.
            AuthenticationError: if who listens there has another key.
        """
        dialed = socket.create_connection((self.host, self.port), HANDSHAKE_TIMEOUT_S)
        return _proven(dialed, self.key, first=False)


class DialingLauncher:
    """Starts workers anywhere: each is given an invitation and dials back over TCP (`worker.dial`).

    Args:
        begin: has a process begin with an invitation, and does not wait for it: (name, invitation) -> the process.
        host: the address to listen on, which workers can reach. Loopback unless told otherwise.
        timeout_s: for a worker to dial.
    """

    def __init__(self, begin: Callable[[str, Invitation], Process], host: str = "127.0.0.1", timeout_s: float = 120.0) -> None:
        self._begin, self._host, self._timeout_s = begin, host, timeout_s

    def start(self, name: str, setup: Setup, pipes: Sequence[socket.socket] = ()) -> Link:
        if pipes:
            raise ValueError(
                f"{name} is to be of several processes, and only those that are started on this machine can be one copy; set "
                "engine.embedded.tensor_parallel to 1"
            )
        key = secrets.token_bytes(32)
        try:
            listener = socket.create_server((self._host, 0))
        except OSError as error:
            why = f"{error.strerror}; is it an address of this machine?"
            raise EngineFailed(f"{name}: nobody can dial back to {self._host}: {why}") from error
        with listener:
            process = self._begin(name, Invitation(self._host, listener.getsockname()[1], key))
            try:
                connection = self._wait(name, listener, key, process)
            except BaseException:
                process.kill()
                raise
        return _told(Link(connection, process), setup)

    def _wait(self, name: str, listener: socket.socket, key: bytes, process: Process) -> Connection:
        """The connection of whoever proves to be the worker; strangers are turned away."""
        deadline = time.monotonic() + self._timeout_s
        listener.settimeout(0.2)
        while time.monotonic() < deadline:
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                if (ended := process.ended(0.0)) is not None:
                    raise EngineFailed(f"{name} ended before it dialed ({ended.words}){said(process)}") from None
                continue
            try:
                return _proven(caller, key, first=True)
            except (AuthenticationError, OSError, EOFError):
                continue
        raise EngineFailed(f"{name} did not dial back to {self._host} within {self._timeout_s:g} s{said(process)}")


def _told(link: Link, setup: Setup) -> Link:
    with suppress(OSError):  # a worker that is gone already is seen when it is waited for
        link.connection.send(setup)
    return link


def said(process: Process, num_lines: int = 12) -> str:
    """A process's last words, for the end of an error."""
    lines = process.last_lines()[-num_lines:]
    return "\nit said last:\n    " + "\n    ".join(lines) if lines else ""


def _proven(link: socket.socket, key: bytes, *, first: bool) -> Connection:
    """A connection whose other end has the key. Who says nothing is not waited for."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(HANDSHAKE_TIMEOUT_S), 0))
    forever = link.dup()
    connection = Connection(link.detach())
    try:
        for ask in (first, not first):
            (deliver_challenge if ask else answer_challenge)(connection, key)
    except AssertionError as odd:  # how the library says that this is no challenge
        connection.close()
        raise AuthenticationError("whoever is at the other end does not speak as a worker") from odd
    except BaseException:
        connection.close()
        raise
    else:
        forever.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    finally:
        forever.close()
    return connection
