"""Calls over a connection between two processes, several at once.

Messages are pickled: both ends are parts of one run, and those that met over a network have proven it to
each other before (`engine/workers/dialing.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

from whet.calls.messages import CancelCall, RemoteCall, RemoteFailure, RemoteResult, answer_of
from whet.calls.methods import MethodKind, Target, invoke

NOTHING_MORE = b""
"""Ends the thread that sends."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A caller that waits for answers: its queue, and the queue's event loop."""

    number: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue[Any])

    def put(self, answer: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class Caller:
    """The calling end of a connection. Calls come from any event loop, and none waits for another; only a
    thread waits if the other end reads nothing.

    Args:
        connection: to the process that serves the calls (`CallServer`).
        name: name of the threads.
        lost: error of calls when the other end is gone, with `cause`.
        raised: the error of a call that failed in the other process.
    """

    def __init__(
        self, connection: Connection, name: str, lost: Callable[[str], Exception], raised: Callable[[RemoteFailure], Exception]
    ) -> None:
        self._connection, self._name, self._lost, self._raised = connection, name, lost, raised
        self.cause: str | None = None
        """Why no further call can be made."""
        self._waiting: dict[int, _Waiting] = {}
        """By numbers of calls: an id of a request may be used again while answers to the last one are on their way."""
        self._numbers = itertools.count()
        self._outbox = SimpleQueue[bytes]()
        self._lock = threading.Lock()
        """Lock of the connection while it is written to or closed."""
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def notify(self, target: str, method: str, *args: object) -> None:
        """Make a call without an answer. Raises `lost` if the other end is gone."""
        self._send(RemoteCall(target, method, args))

    async def call(self, target: str, method: str, *args: object) -> Any:
        """Make a call and return its value.

        Raises:
            Exception: `raised` or `lost`.
        """
        with self._asked() as waiting:
            self._send(RemoteCall(target, method, args, number=waiting.number))
            return self._value(await waiting.answers.get())

    async def stream(self, target: str, method: str, *args: object) -> AsyncGenerator[Any]:
        """Make a call and give its values. It is cancelled over there if it is closed early. Errors as `call`."""
        with self._asked() as waiting:
            more = True
            try:
                self._send(RemoteCall(target, method, args, number=waiting.number))
                while True:
                    answer = await waiting.answers.get()
                    more = isinstance(answer, RemoteResult) and answer.more
                    value = self._value(answer)
                    if not more:
                        return
                    yield value
            finally:
                if more and self.cause is None:
                    self.post(CancelCall(waiting.number))

    def listen(self, ended: Callable[[], None]) -> None:
        """Hand answers to their callers, from now on.

        Args:
            ended: called when the connection has ended, before waiting calls raise; it sets the cause.
        """
        threading.Thread(target=self._read, args=(ended,), name=self._name, daemon=True).start()

    def post(self, message: object) -> None:
        """Send a message after the earlier ones."""
        self.post_bytes(bytes(ForkingPickler.dumps(message)))  # here: what cannot be pickled is the sender's fault

    def post_bytes(self, data: bytes) -> None:
        self._outbox.put(data)

    def wake(self) -> None:
        """Have all waiting calls raise `lost`."""
        for waiting in list(self._waiting.values()):
            waiting.put(self._gone())

    def close(self) -> None:
        """Close the connection. After `listen` it is closed as it ends."""
        self._outbox.put(NOTHING_MORE)
        self._connection.close()

    @contextmanager
    def _asked(self) -> Iterator[_Waiting]:
        waiting = _Waiting(next(self._numbers))
        self._waiting[waiting.number] = waiting
        try:
            yield waiting
        finally:
            del self._waiting[waiting.number]

    def _send(self, call: RemoteCall) -> None:
        if self.cause is not None:
            raise self._gone()
        self.post(call)

    def _gone(self) -> Exception:
        return self._lost(self.cause or "")

    def _value(self, answer: Exception | RemoteFailure | RemoteResult) -> Any:
        match answer:
            case RemoteResult():
                return answer.value
            case RemoteFailure():
                error = self._raised(answer)
                error.add_note(f"in the process that was called:\n{answer.traceback}")
                raise error
            case _:
                raise answer

    def _write(self) -> None:
        with suppress(OSError):  # who reads says why
            while data := self._outbox.get():
                with self._lock:
                    self._connection.send_bytes(data)

    def _read(self, ended: Callable[[], None]) -> None:
        try:
            while True:
                answer = self._connection.recv()
                if (waiting := self._waiting.get(answer.number)) is not None:
                    waiting.put(answer)
        except (EOFError, OSError, TypeError):  # TypeError: the connection was closed meanwhile
            ended()
            self.wake()
            with self._lock:
                self.close()


class CallServer:
    """The serving end of a connection: calls run side by side on the event loop.

    Args:
        connection: to the process that calls (`Caller`).
        targets: objects by their names in calls.
        gone: called on another thread when the caller is gone.
    """

    def __init__(self, connection: Connection, targets: Mapping[str, Target], gone: Callable[[], object]) -> None:
        self._connection, self._targets, self._gone = connection, targets, gone
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve until the caller says that no call follows (None)."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Any]()
        threading.Thread(target=self._read, args=(lambda m: loop.call_soon_threadsafe(inbox.put_nowait, m),), daemon=True).start()
        while (message := await inbox.get()) is not None:
            if isinstance(message, CancelCall):
                if (task := self._running.get(message.number)) is not None:
                    task.cancel()
                continue
            kind, found = invoke(self._targets, message)
            if (number := message.number) is not None:
                task = self._running[number] = asyncio.create_task(self._answer(number, kind, found))
                task.add_done_callback(lambda _, number=number: self._running.pop(number))  # also of one that is cancelled before it ran

    def _read(self, take: Callable[[Any], object]) -> None:
        try:
            while True:
                take(self._connection.recv())
        except (EOFError, OSError):
            self._gone()

    async def _answer(self, number: int, kind: MethodKind, found: Any) -> None:
        try:
            value = None
            if kind is MethodKind.STREAM:
                async for each in found:
                    self._connection.send(RemoteResult(each, number, more=True))
            else:
                value = await found
            self._connection.send(RemoteResult(value, number))
        except Exception as error:  # raised again where it was called
            self._connection.send(answer_of(error, number=number))
