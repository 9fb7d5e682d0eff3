"""A copy of the engine as the trainer's process sees it: one process, or several ranks of which the first answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whet.engine.base import Capabilities, EngineFailed
from whet.engine.embedded.launch import Launcher, Link, said
from whet.engine.embedded.ranks import LOST, Links
from whet.engine.embedded.runner import CLOSED
from whet.engine.embedded.worker import Setup

START_TIMEOUT_S = 300.0
"""For a copy to import torch, attach to the weights and, where it computes on a device of its own, to move them there."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class Waiting:
    """Who waits for a copy's answers: its queue, and the event loop that the queue is of."""

    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue[Any])

    def put(self, answer: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class CopyProcess:
    """One copy: its processes, and threads that hand its answers to whoever waits for them and notice when one dies.

    Args:
        name: in errors.
        setup: of its first rank.
        devices: of all of its ranks.
        store: a file for the ranks to meet in.
        launcher: starts its processes.
    """

    def __init__(self, name: str, setup: Setup, devices: Sequence[str], store: Path, launcher: Launcher) -> None:
        self.name = name
        self.processes = [name if len(devices) == 1 else f"{name}, rank {rank}" for rank in range(len(devices))]
        """What each of its processes is called."""
        self.requests: dict[str, Waiting] = {}
        self.conversations: set[str] = set()
        self._calls: dict[int, Waiting] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._failure: str | None = None
        pipes = [socket.socketpair() for _ in devices[1:]]
        ends = [tuple(pair[0] for pair in pipes), *((pair[1],) for pair in pipes)]
        self._links: list[Link] = []
        for rank, (device, mine) in enumerate(zip(devices, ends, strict=True)):
            links = Links(store, len(devices), rank, tuple(end.fileno() for end in mine)) if pipes else None
            called = self.processes[rank]
            self._links.append(launcher.start(called, replace(setup, device=device, links=links, name=called), mine))
        for end in itertools.chain.from_iterable(pipes):
            end.close()
        for link in self._links[1:]:
            threading.Thread(target=self._watch, args=(link,), name=f"whet {name}", daemon=True).start()

    def ready(self) -> Capabilities:
        """Wait until it can serve. Raises EngineFailed if it cannot."""
        if not self._links[0].connection.poll(START_TIMEOUT_S):
            self._kill()
        try:
            _, capabilities = self._links[0].connection.recv()
        except (EOFError, OSError):
            raise EngineFailed(self._culprit("did not start")) from None
        threading.Thread(target=self._read, name=f"whet {self.name}", daemon=True).start()
        return capabilities

    @property
    def load(self) -> int:
        return len(self.conversations) + len(self.requests)

    def send(self, message: object) -> None:
        try:
            with self._lock:
                self._links[0].connection.send(message)
        except OSError:
            raise EngineFailed(self._failure or f"{self.name} is gone") from None

    def wait(self, request_id: str) -> Waiting:
        """Take note of a request whose chunks are waited for."""
        waiting = self.requests[request_id] = Waiting(asyncio.get_running_loop())
        return waiting

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method over there."""
        number = next(self._numbers)
        waiting = self._calls[number] = Waiting(asyncio.get_running_loop())
        try:
            self.send(("call", number, method, arguments))
            answer = await waiting.answers.get()
        finally:
            del self._calls[number]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Have it end by itself, or else kill it. Whoever still waits is told."""
        self._failure = self._failure or f"{self.name}: {CLOSED}"
        if self._links:
            with contextlib.suppress(EngineFailed):
                self.send(("close",))
        for link in self._links:
            if link.process.ended(CLOSE_TIMEOUT_S) is None:
                link.process.kill()
                link.process.ended(CLOSE_TIMEOUT_S)
        self._tell_everybody()
        for link in self._links:
            link.connection.close()

    def _read(self) -> None:
        try:
            while True:
                self._hand_over(self._links[0].connection.recv())
        except (EOFError, OSError, TypeError):  # TypeError: the connection was closed meanwhile
            self._failure = self._failure or self._culprit("died")
            self._kill()
            self._tell_everybody()

    def _watch(self, link: Link) -> None:
        """See another rank than the first end; the first cannot go on without it."""
        with contextlib.suppress(EOFError, OSError, TypeError):
            link.connection.recv()
        if self._failure is None:
            link.process.ended(CLOSE_TIMEOUT_S)  # how it ended is to be seen before the first is ended, too
            self._kill(first_only=True)

    def _hand_over(self, message: tuple[str, Any, Any]) -> None:
        kind, key, value = message
        waiting = (self._calls if kind in ("returned", "raised") else self.requests).get(key)
        if waiting is not None:
            waiting.put(value)

    def _tell_everybody(self) -> None:
        for waiting in [*self._calls.values(), *self.requests.values()]:
            waiting.put(EngineFailed(self._failure))

    def _kill(self, *, first_only: bool = False) -> None:
        for link in self._links[: 1 if first_only else None]:
            link.process.kill()

    def _culprit(self, what: str) -> str:
        """Which of its processes ended first and how, in words: those that end because of another one say so by their status."""
        ends = [link.process.ended(CLOSE_TIMEOUT_S) for link in self._links]
        others = [rank for rank, end in enumerate(ends) if rank and end is not None and end.code not in (0, LOST)]
        rank = others[0] if others else 0
        end = ends[rank]
        how = "it closed its connection and goes on" if end is None else end.words
        return f"{self.processes[rank]} {what} ({how}){said(self._links[rank].process)}"
