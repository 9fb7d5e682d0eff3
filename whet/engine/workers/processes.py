"""A copy of the engine as the trainer's process sees it, a member of a pool: one process, or several ranks of which the first answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from whet.engine.base import Capabilities, EngineFailed, EngineLost, Vitals
from whet.engine.embedded.runner import CLOSED
from whet.engine.embedded.tensor_parallel import LOST, Links
from whet.engine.workers import first_weights
from whet.engine.workers.launch import LOOK_S, Launcher, Link, last_words
from whet.engine.workers.setup import Setup
from whet.types import Chunk, Request, Scored

CLOSE_TIMEOUT_S = 10.0
NOTHING_MORE = b""
"""Ends the thread that sends."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A caller that waits for a copy's answers: its queue, and the queue's event loop."""

    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue[Any])

    def put(self, answer: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class CopyProcess:
    """One copy: its processes, and threads that hand its answers to their callers and notice a death.

    Args:
        name: its name in errors.
        setup: setup of its first rank.
        devices: devices of all its ranks.
        store: a file over which the ranks meet.
        launcher: starts its processes.
        given_up: set when no caller waits for its start any more.
    """

    def __init__(self, name: str, setup: Setup, devices: Sequence[str], store: Path, launcher: Launcher, given_up: threading.Event) -> None:
        self.name = name
        ranks = range(len(devices))
        self.processes = [setup.name if len(devices) == 1 else f"{setup.name}, rank {rank}" for rank in ranks]
        """Names of its processes, used to address weight transfers. A restarted process gets a new
        name."""
        self._capabilities: Capabilities | None = None
        self._waiting: dict[int, Waiting] = {}
        """By the numbers of what was asked: an id of a request may be used again while answers to the last one are on their way."""
        self._numbers = itertools.count()
        self._outbox = SimpleQueue[bytes]()
        """Messages to send: only a thread waits if a copy reads nothing."""
        self._lock = threading.Lock()
        """Lock of the connection while it is written to or closed."""
        self._failure: str | None = None
        pipes = [socket.socketpair() for _ in devices[1:]]
        ends = [tuple(pair[0] for pair in pipes), *((pair[1],) for pair in pipes)]
        self._first = first_weights.FirstWeights(setup.model)
        self._links: list[Link] = []
        try:
            for rank, (device, mine) in enumerate(zip(devices, ends, strict=True)):
                links = Links(store, len(devices), rank, tuple(end.fileno() for end in mine)) if pipes else None
                called = name if len(devices) == 1 else f"{name}, rank {rank}"
                own = replace(setup, device=device, links=links, name=self.processes[rank])
                self._links.append(launcher.start(called, own, mine, given_up=given_up))
        except BaseException:
            self.kill()
            raise
        finally:
            for end in itertools.chain.from_iterable(pipes):
                end.close()
        for link in self._links[1:]:
            threading.Thread(target=self._watch, args=(link,), name=f"whet {name}", daemon=True).start()

    def ready(self, given_up: threading.Event, timeout_s: float) -> None:
        """Wait until it can serve. Raises EngineFailed if it cannot, or waiting for it is given up."""
        threading.Thread(target=self._write, name=f"whet {self.name}", daemon=True).start()
        try:
            self._wait_for_start(given_up, time.monotonic() + timeout_s, f"within {timeout_s:g} s (engine.pool.start_timeout_s)")
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._read, name=f"whet {self.name}", daemon=True).start()

    def _wait_for_start(self, given_up: threading.Event, deadline: float, within: str) -> None:
        while self._capabilities is None:
            try:
                while not self._links[0].connection.poll(LOOK_S):
                    if given_up.is_set():
                        raise EngineFailed(f"{self.name}: {CLOSED}")
                    if time.monotonic() > deadline:
                        raise EngineFailed(f"{self.name} did not start {within}{last_words(self._links[0].process)}")
                kind, told = self._links[0].connection.recv()
            except (EOFError, OSError):
                raise EngineFailed(self._culprit("did not start")) from None
            match kind:
                case first_weights.PIECE:
                    self._outbox.put(self._first.piece(*told))
                case first_weights.HELD:
                    self._first.check(self.name, told)
                case _:
                    self._capabilities = told

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "a copy was asked before it was ready"
        return self._capabilities

    def open(self, conversation: str) -> None:
        self.send(("tell", "open", (conversation,)))

    def release(self, conversation: str) -> None:
        self.send(("tell", "release", (conversation,)))

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        number = next(self._numbers)
        waiting = self._waiting[number] = Waiting(asyncio.get_running_loop())
        finished = False
        try:
            self.send(("generate", number, request))
            while not finished:
                answer = await waiting.answers.get()
                if isinstance(answer, Exception):
                    finished = True
                    raise answer
                finished = answer.finish is not None
                yield answer
        finally:
            del self._waiting[number]
            if not finished:  # the consumer went away early
                with contextlib.suppress(EngineFailed):
                    self.send(("drop", number))

    async def abort(self, request_id: str) -> None:
        await self.call("abort", request_id)

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        return await self.call("score", tokens, temperature, top_logprobs)

    async def pause(self) -> None:
        await self.call("pause")

    async def resume(self) -> None:
        await self.call("resume")

    async def flush(self) -> None:
        await self.call("flush")

    async def sleep(self) -> None:
        await self.call("sleep")

    async def vitals(self) -> Vitals:
        return await self.call("vitals")

    def stacks(self, *, lost: bool) -> str:
        return "\n".join(found for link in self._links if (found := link.process.stacks(lost=lost)))

    def kill(self) -> None:
        self._failure = self._failure or f"{self.name} was killed"
        self._kill()
        self._tell_everybody()  # a machine that is gone closes no connection
        for link in self._links:
            if link.process.ended(CLOSE_TIMEOUT_S) is None:
                raise RuntimeError(f"{self.name} cannot be ended: the machine holds on to its process")
        if self._capabilities is None:  # nobody reads it yet
            self._outbox.put(NOTHING_MORE)
        self._close()

    def send(self, message: object) -> None:
        """Send a message after the earlier ones. Raises EngineLost if the copy is gone."""
        if self._failure is not None:
            raise EngineLost(self._failure)
        self._post(message)

    def _post(self, message: object) -> None:
        self._outbox.put(bytes(ForkingPickler.dumps(message)))  # here: what cannot be pickled is the sender's fault

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # who reads says why
            while message := self._outbox.get():
                with self._lock:
                    self._links[0].connection.send_bytes(message)

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method over there."""
        number = next(self._numbers)
        waiting = self._waiting[number] = Waiting(asyncio.get_running_loop())
        try:
            self.send(("call", number, method, arguments))
            answer = await waiting.answers.get()
        finally:
            del self._waiting[number]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End it by a message, or else kill it. Waiting callers get an error."""
        self._failure = self._failure or f"{self.name}: {CLOSED}"
        if self._capabilities is None:
            self._kill()
        self._post(("close",))
        for link in self._links:
            if link.process.ended(CLOSE_TIMEOUT_S) is None:
                link.process.kill()
                link.process.ended(CLOSE_TIMEOUT_S)
        self._tell_everybody()
        self._close()

    def _close(self) -> None:
        for link in self._links:
            if link is not self._links[0] or self._capabilities is None:  # of the first, who reads it closes it
                link.connection.close()

    def _read(self) -> None:
        try:
            while True:
                number, answer = self._links[0].connection.recv()
                if (waiting := self._waiting.get(number)) is not None:
                    waiting.put(answer)
        except (EOFError, OSError, TypeError):  # TypeError: the connection was closed meanwhile
            self._failure = self._failure or self._culprit("died")
            self._kill()
            self._tell_everybody()
            self._outbox.put(NOTHING_MORE)
            with self._lock:
                self._links[0].connection.close()

    def _watch(self, link: Link) -> None:
        """See another rank than the first end; the first cannot go on without it."""
        with contextlib.suppress(EOFError, OSError, TypeError):
            link.connection.recv()
        if self._failure is None:
            link.process.ended(CLOSE_TIMEOUT_S)  # how it ended is to be seen before the first is ended, too
            self._kill(first_only=True)

    def _tell_everybody(self) -> None:
        for waiting in list(self._waiting.values()):
            waiting.put(EngineLost(self._failure))

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
        return f"{self.processes[rank]} {what} ({how}){last_words(self._links[rank].process)}"
