"""Workers that are started elsewhere: each gets an `Invitation` and dials back.

Both sides then prove to each other that they have the invitation's key (the challenge of
`multiprocessing.connection`, an HMAC), and only after that is anything unpickled. The key is for one
worker of one run, so a process that has it is part of the run, and pickles cross no trust boundary; it
travels with the start of the worker, never on a command line. Nothing is encrypted: listen on loopback,
or on a network whose machines are trusted.
"""

from __future__ import annotations

import itertools
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue

from whet.engine.base import EngineFailed
from whet.engine.workers.launch import LOOK_S, LOOPBACK, Link, WorkerProcess, last_words, send_setup
from whet.engine.workers.setup import Setup

HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds for a caller to prove that it has the key, even if it keeps sending bytes."""
MOST_CALLERS = 64
"""Callers that may be about to prove themselves; one more, and the first of them is turned away."""
AGAIN_S = 0.2
"""About so long after it was turned away, a worker dials again."""
KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""Checks of a silent connection: seconds before the first, seconds between two, and number of failures
until the connection counts as broken."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Address for a worker to dial, and the key of its proof."""

    host: str
    port: int
    key: bytes = field(repr=False)
    timeout_s: float
    """Seconds that the invited worker may take; other callers may be heard before it."""

    def accept(self) -> Connection:
        """Dial, from the worker's side, and prove the key to each other. A worker turned away by too
        many callers dials again.

        Raises:
            OSError: if nobody listens there any more.
            EOFError: if it was turned away until its time was over.
            AuthenticationError: if who listens there has another key.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            left_s = max(LOOK_S, deadline - time.monotonic())
            try:
                return _proven(socket.create_connection((self.host, self.port), left_s), self.key, left_s)
            except (EOFError, ConnectionResetError, BrokenPipeError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(AGAIN_S * (0.5 + random.random()))


class DialingLauncher:
    """Starts workers anywhere: each gets an invitation and dials back over TCP (`worker.dial`).

    Args:
        begin: starts a process with an invitation, and does not wait for it to dial: (name, invitation,
            given_up) -> the process. It raises EngineFailed if the process cannot start, or was given
            up before.
        address: address of this machine, to listen on, which workers can reach. Default: loopback.
        timeout_s: seconds for a worker to dial.
    """

    def __init__(
        self, begin: Callable[[str, Invitation, threading.Event], WorkerProcess], address: str = LOOPBACK, timeout_s: float = 120.0
    ) -> None:
        self._begin, self.address, self._timeout_s = begin, address, timeout_s

    def start(self, name: str, setup: Setup, pipes: Sequence[socket.socket] = (), *, given_up: threading.Event) -> Link:
        if pipes:
            raise ValueError(
                f"{name} is to be of several processes, and only those that are started on this machine can be one copy; set "
                "engine.embedded.tensor_parallel to 1"
            )
        key = secrets.token_bytes(32)
        try:
            listener = socket.create_server((self.address, 0), backlog=socket.SOMAXCONN)
        except OSError as error:
            why = f"{error.strerror}; is it an address of this machine?"
            raise EngineFailed(f"{name}: nobody can dial back to {self.address}: {why}") from error
        with listener:
            process = self._begin(name, Invitation(self.address, listener.getsockname()[1], key, self._timeout_s), given_up)
            try:
                connection = self._wait(name, listener, key, process, given_up)
            except BaseException:
                process.kill()
                raise
        return send_setup(Link(connection, process), setup)

    def _wait(self, name: str, listener: socket.socket, key: bytes, process: WorkerProcess, given_up: threading.Event) -> Connection:
        """Connection of the caller that proves to be the worker; strangers are turned away, and do not
        delay it."""
        deadline, proven = time.monotonic() + self._timeout_s, SimpleQueue[Connection]()
        callers = _Callers(key, proven)
        threading.Thread(target=_hear_callers, args=(listener, callers), name=f"whet {name} calls", daemon=True).start()
        while time.monotonic() < deadline:
            with suppress(Empty):
                return proven.get(timeout=LOOK_S)
            if (ended := process.ended(0.0)) is not None:
                raise EngineFailed(f"{name} ended before it dialed ({ended.words}){last_words(process)}") from None
            if given_up.is_set():
                raise EngineFailed(f"{name}: it was given up before it dialed back")
        raise EngineFailed(f"{name} did not dial back to {self.address} within {self._timeout_s:g} s{last_words(process)}")


class _Callers:
    """Callers of a listener: each proves itself in a thread of its own.

    At most `MOST_CALLERS` that have not shown the key are heard at once. If all places are taken the
    first one is dropped for a new caller, since a caller with the key shows it in milliseconds.

    Args:
        key: the key that callers must have.
        proven: queue for the connections of callers that have it.
    """

    def __init__(self, key: bytes, proven: SimpleQueue[Connection]) -> None:
        self._key, self._proven = key, proven
        self._strange: dict[int, socket.socket] = {}
        """Callers that have not shown the key, by their numbers; the first to come is the first."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def hear(self, caller: socket.socket) -> None:
        """Begin to hear one more."""
        number = next(self._numbers)
        with self._lock:
            if len(self._strange) >= MOST_CALLERS:
                self._turn_away(next(iter(self._strange)))
            self._strange[number] = caller.dup()
        threading.Thread(target=self._hear, args=(number, caller), name="whet caller", daemon=True).start()

    def close(self) -> None:
        """Turn away who is left."""
        with self._lock:
            for number in list(self._strange):
                self._turn_away(number)

    def _hear(self, number: int, caller: socket.socket) -> None:
        try:
            with suppress(AuthenticationError, OSError, EOFError):
                self._proven.put(_proven(caller, self._key, HANDSHAKE_TIMEOUT_S, known=lambda: self._know(number)))
        finally:
            with self._lock:
                if number in self._strange:
                    self._strange.pop(number).close()

    def _know(self, number: int) -> None:
        """Note that a caller has shown the key, so that it is not turned away any more. Raises EOFError
        if it was."""
        with self._lock:
            if number not in self._strange:
                raise EOFError("it was turned away")
            self._strange.pop(number).close()

    def _turn_away(self, number: int) -> None:
        with self._strange.pop(number) as duplicate, suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)


def _hear_callers(listener: socket.socket, callers: _Callers) -> None:
    """Hear callers until the listener is closed."""
    listener.settimeout(LOOK_S)
    try:
        while True:
            with suppress(TimeoutError):
                callers.hear(listener.accept()[0])
    except OSError:
        callers.close()


def _keep_alive(link: socket.socket) -> None:
    """Have the system probe a silent connection, since a peer whose machine or network is gone cannot
    close it: after about two minutes without an answer the connection is broken. While data is in
    flight, the system's own timeout counts."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):  # where the system has no such setting, its own is used
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _proven(link: socket.socket, key: bytes, timeout_s: float, known: Callable[[], None] | None = None) -> Connection:
    """A connection whose other end has the key, and shows it in time.

    Args:
        link: to the other end.
        key: key that both have.
        timeout_s: for all of it.
        known: is called as soon as the other end has shown the key; who is called asks first. None: this end has called.
    """
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(link)
    duplicate, expired = link.dup(), threading.Event()

    def cut() -> None:
        expired.set()
        with suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)

    connection = Connection(link.detach())
    late = threading.Timer(timeout_s, cut)
    late.daemon = True
    late.start()
    try:
        if known is None:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        else:
            deliver_challenge(connection, key)
            known()
            answer_challenge(connection, key)
    except (AssertionError, ValueError) as odd:  # how the library says that this is no challenge
        connection.close()
        raise AuthenticationError("whoever is at the other end does not speak as a worker") from odd
    except BaseException:
        connection.close()
        raise
    finally:
        late.cancel()
        late.join()
        duplicate.close()
    if expired.is_set():
        connection.close()
        raise EOFError("whoever is at the other end took too long to show that it has the key")
    return connection
