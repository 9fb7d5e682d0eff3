"""A copy of the engine as the trainer's process sees it, a member of a pool: one process, or several ranks of which the first answers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from whet.calls.messages import RemoteFailure
from whet.calls.methods import Target, invoke
from whet.calls.pipe import Caller
from whet.engine.base import Capabilities, EngineFailed, EngineHealth, EngineLost, EngineRefused, StaleCache
from whet.engine.embedded.runner import CLOSED
from whet.engine.embedded.tensor_parallel import LOST, Links
from whet.engine.workers.first_weights import FIRST_WEIGHTS, FirstWeights
from whet.engine.workers.launch import LOOK_S, Launcher, Link, last_words
from whet.engine.workers.setup import Setup
from whet.transport.base import OtherBase, Ticket, TransportError
from whet.types import Chunk, Receipt, Request, Scored
from whet.types.columns import Ints

CLOSE_TIMEOUT_S = 10.0
ENGINE, WEIGHTS = "engine", "weights"
"""Targets of calls: a copy's engine (`EngineCalls`), and what brings it new weights (`WeightCalls`)."""
KNOWN = {each.__name__: each for each in (EngineRefused, EngineFailed, StaleCache, TransportError, OtherBase, ValueError)}
"""Errors that a caller may need to tell apart; any other becomes an `EngineFailed` with its message."""


def error_of(failure: RemoteFailure) -> Exception:
    """The error of a call that failed in a copy."""
    kind, message = KNOWN.get(failure.kind), f"{failure.message}{failure.cause}"
    return EngineFailed(f"{failure.kind}: {message}") if kind is None else kind(message)


class CopyProcess:
    """One copy: its processes, the calls of its engine, and threads that notice a death.

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
        self.receivers = [setup.name if len(devices) == 1 else f"{setup.name}, rank {rank}" for rank in ranks]
        """As `Member.receivers`."""
        self._capabilities: Capabilities | None = None
        pipes = [socket.socketpair() for _ in devices[1:]]
        ends = [tuple(pair[0] for pair in pipes), *((pair[1],) for pair in pipes)]
        self._links: list[Link] = []
        try:
            for rank, (device, mine) in enumerate(zip(devices, ends, strict=True)):
                links = Links(store, len(devices), rank, tuple(end.fileno() for end in mine)) if pipes else None
                called = name if len(devices) == 1 else f"{name}, rank {rank}"
                own = replace(setup, device=device, links=links, name=self.receivers[rank])
                self._links.append(launcher.start(called, own, mine, given_up=given_up))
        except BaseException:
            self._kill()
            for link in self._links:
                link.process.ended(CLOSE_TIMEOUT_S)
                link.connection.close()
            raise
        finally:
            for end in itertools.chain.from_iterable(pipes):
                end.close()
        self._offered = {FIRST_WEIGHTS: Target(FirstWeights(setup.model, name), FirstWeights)}
        self._calls = Caller(self._links[0].connection, f"whet {name}", EngineLost, error_of)
        for link in self._links[1:]:
            threading.Thread(target=self._watch, args=(link,), name=f"whet {name}", daemon=True).start()

    def ready(self, given_up: threading.Event, timeout_s: float) -> None:
        """Wait until it can serve. Raises EngineFailed if it cannot, or waiting for it is given up."""
        try:
            self._wait_for_start(given_up, time.monotonic() + timeout_s, f"within {timeout_s:g} s (engine.pool.start_timeout_s)")
        except BaseException:
            self.kill()
            raise
        self._calls.listen(self._died)

    def _wait_for_start(self, given_up: threading.Event, deadline: float, within: str) -> None:
        while self._capabilities is None:
            try:
                while not self._links[0].connection.poll(LOOK_S):
                    if given_up.is_set():
                        raise EngineFailed(f"{self.name}: {CLOSED}")
                    if time.monotonic() > deadline:
                        raise EngineFailed(f"{self.name} did not start {within}{last_words(self._links[0].process)}")
                message = self._links[0].connection.recv()
            except (EOFError, OSError):
                raise EngineFailed(self._culprit("did not start")) from None
            if isinstance(message, Capabilities):
                self._capabilities = message
            elif (piece := invoke(self._offered, message)[1]) is not None:
                self._calls.post_bytes(piece)

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "a copy was asked before it was ready"
        return self._capabilities

    def open(self, conversation: str) -> None:
        self._calls.notify(ENGINE, "open", conversation)

    def release(self, conversation: str) -> None:
        self._calls.notify(ENGINE, "release", conversation)

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        return self._calls.stream(ENGINE, "generate", request)

    async def abort(self, request_id: str) -> None:
        await self._calls.call(ENGINE, "abort", request_id)

    async def score(self, tokens: Ints, temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        return await self._calls.call(ENGINE, "score", tokens, temperature, top_logprobs)

    async def pause(self) -> None:
        await self._calls.call(ENGINE, "pause")

    async def resume(self) -> None:
        await self._calls.call(ENGINE, "resume")

    async def flush(self) -> None:
        await self._calls.call(ENGINE, "flush")

    async def sleep(self) -> None:
        await self._calls.call(ENGINE, "sleep")

    async def update(self, ticket: Ticket, version: int) -> Receipt:
        return await self._calls.call(WEIGHTS, "update", ticket, version)

    async def health(self) -> EngineHealth:
        return await self._calls.call(ENGINE, "health")

    def stacks(self, *, lost: bool) -> str:
        return "\n".join(found for link in self._links if (found := link.process.stacks(lost=lost)))

    def kill(self) -> None:
        self._calls.cause = self._calls.cause or f"{self.name} was killed"
        self._kill()
        self._calls.wake()  # a machine that is gone closes no connection
        for link in self._links:
            if link.process.ended(CLOSE_TIMEOUT_S) is None:
                raise RuntimeError(f"{self.name} cannot be ended: the machine holds on to its process")
        self._close()

    def stop(self) -> None:
        self._calls.cause = self._calls.cause or f"{self.name}: {CLOSED}"
        if self._capabilities is None:
            self._kill()
        self._calls.post(None)
        for link in self._links:
            if link.process.ended(CLOSE_TIMEOUT_S) is None:
                link.process.kill()
                link.process.ended(CLOSE_TIMEOUT_S)
        self._calls.wake()
        self._close()

    def _close(self) -> None:
        for link in self._links[1:]:
            link.connection.close()
        if self._capabilities is None:  # else it is closed as it ends
            self._calls.close()

    def _died(self) -> None:
        self._calls.cause = self._calls.cause or self._culprit("died")
        self._kill()

    def _watch(self, link: Link) -> None:
        """See another rank than the first end; the first cannot go on without it."""
        with contextlib.suppress(EOFError, OSError, TypeError):
            link.connection.recv()
        if self._calls.cause is None:
            link.process.ended(CLOSE_TIMEOUT_S)  # how it ended is to be seen before the first is ended, too
            self._kill(first_only=True)

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
        return f"{self.receivers[rank]} {what} ({how}){last_words(self._links[rank].process)}"
