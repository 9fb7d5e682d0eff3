"""Copies of the embedded engine in processes of their own, which share one set of weights: sampling on more cores or devices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.engine.base import Capabilities, EngineFailed
from whet.engine.embedded.engine import EmbeddedConfig, copy_weights
from whet.engine.embedded.runner import CLOSED
from whet.engine.embedded.worker import Setup
from whet.model.causal import CausalModel
from whet.model.digest import digests_of
from whet.model.shared import share
from whet.types import Chunk, Receipt, Request, Scored

START_TIMEOUT_S = 300.0
"""For a copy to import torch, attach to the weights and, where it computes on a device of its own, to move them there."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """Who waits for a copy's answers: its queue, and the event loop that the queue is of."""

    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue[Any])

    def put(self, answer: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class _Process:
    """One copy: its process, and a thread that hands its answers to whoever waits for them."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self.requests: dict[str, _Waiting] = {}
        self.conversations: set[str] = set()
        self._calls: dict[int, _Waiting] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._failure: str | None = None
        mine, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(setup.threads)}
        with theirs:
            arguments = [sys.executable, "-m", "whet.engine.embedded.worker", str(theirs.fileno())]
            self._child = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=2)
        self._connection = Connection(mine.detach())
        self.send(setup)

    def ready(self) -> Capabilities:
        """Wait until it can serve. Raises EngineFailed if it cannot."""
        if not self._connection.poll(START_TIMEOUT_S):
            self._child.kill()
        try:
            _, capabilities = self._connection.recv()
        except (EOFError, OSError):
            raise EngineFailed(f"{self.name} did not start ({self._exit()}); what it said is above") from None
        threading.Thread(target=self._read, name=f"whet {self.name}", daemon=True).start()
        return capabilities

    @property
    def load(self) -> int:
        return len(self.conversations) + len(self.requests)

    def send(self, message: object) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            raise EngineFailed(self._failure or f"{self.name} is gone") from None

    def wait(self, request_id: str) -> _Waiting:
        """Take note of a request whose chunks are waited for."""
        waiting = self.requests[request_id] = _Waiting(asyncio.get_running_loop())
        return waiting

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method over there."""
        number = next(self._numbers)
        waiting = self._calls[number] = _Waiting(asyncio.get_running_loop())
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
        with contextlib.suppress(EngineFailed):
            self.send(("close",))
        try:
            self._child.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._tell_everybody()
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                self._hand_over(self._connection.recv())
        except (EOFError, OSError, TypeError):  # TypeError: the connection was closed meanwhile
            self._failure = self._failure or f"{self.name} died ({self._exit()}); what it said last is in the run's output"
            self._tell_everybody()

    def _hand_over(self, message: tuple[str, Any, Any]) -> None:
        kind, key, value = message
        waiting = (self._calls if kind in ("returned", "raised") else self.requests).get(key)
        if waiting is not None:
            waiting.put(value)

    def _tell_everybody(self) -> None:
        for waiting in [*self._calls.values(), *self.requests.values()]:
            waiting.put(EngineFailed(self._failure))

    def _exit(self) -> str:
        try:
            code = self._child.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection and goes on"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


class EngineCopies:
    """An `Engine` of several embedded ones. A conversation stays with the copy that it began with, new ones go where the fewest are.

    Args:
        model: its tensors are moved into memory that the copies share, so it must be nobody else's. In the CPU's memory.
        config: sizes of each copy, and how many there are.
        devices: where each copy computes.
        deterministic: as for the embedded engine; which conversation is whose goes by the order in which they were opened.
        tokenizer: folder of a tokenizer to find stop texts with.
        trust_remote_code: whether code that comes with the tokenizer may run.

    Raises:
        EngineFailed: if a copy does not start.
    """

    def __init__(
        self,
        model: CausalModel,
        config: EmbeddedConfig,
        devices: Sequence[str],
        *,
        deterministic: bool,
        tokenizer: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._model = model
        threads = max(1, torch.get_num_threads() // len(devices))
        shared = share(model)
        self._copies: list[_Process] = []
        try:
            for i, device in enumerate(devices):
                setup = Setup(shared, config, device, deterministic, threads, tokenizer, trust_remote_code)
                self._copies.append(_Process(f"engine copy {i}", setup))
            first, *_ = [found.ready() for found in self._copies]
        except BaseException:
            self.end()
            raise
        finally:
            shared.path.unlink()
        self._capabilities = replace(first, shares_weights=False)
        self._version, self._updated, self._paused = 0, False, False

    @property
    def version(self) -> int:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def open(self, conversation: str) -> None:
        home = self._home_of(conversation)
        home.conversations.add(conversation)
        home.send(("tell", "open", (conversation,)))

    def release(self, conversation: str) -> None:
        home = self._home_of(conversation)
        home.conversations.discard(conversation)
        home.send(("tell", "release", (conversation,)))

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        if any(request.id in found.requests for found in self._copies):
            raise ValueError(f"a request with the id {request.id!r} is already running")
        home = self._home_of(request.conversation)
        waiting = home.wait(request.id)
        finished = False
        try:
            home.send(("generate", request))
            while not finished:
                answer = await waiting.answers.get()
                if isinstance(answer, Exception):
                    finished = True
                    raise answer
                finished = answer.finish is not None
                yield answer
        finally:
            del home.requests[request.id]
            if not finished:  # the consumer went away early
                with contextlib.suppress(EngineFailed):
                    home.send(("drop", request.id))

    async def abort(self, request_id: str) -> None:
        for found in self._copies:
            if request_id in found.requests:
                await found.call("abort", request_id)

    async def pause(self) -> None:
        self._paused = True
        await self._everywhere("pause")

    async def resume(self) -> None:
        self._paused = False
        await self._everywhere("resume")

    async def flush(self) -> None:
        await self._everywhere("flush")

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        """Asked of every copy. Raises EngineFailed if they disagree."""
        first, *others = await self._everywhere("score", tokens, temperature, top_logprobs)
        for found, other in zip(self._copies[1:], others, strict=True):
            if other != first:
                worst = max(abs(a - b) for a, b in zip(first.logprobs, other.logprobs, strict=True))
                raise EngineFailed(f"{found.name} scores the same tokens {worst:.3g} nats away from {self._copies[0].name}")
        return first

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        """All copies stand still while their common weights change. The receipt has what a copy holds that differs, if one does."""
        if self._updated and version <= self._version:
            raise ValueError(f"the engine holds version {self._version} already, and was told to take over version {version}")
        wire = list(weights)
        await self._everywhere("pause")
        try:
            await asyncio.to_thread(copy_weights, dict(self._model.named_weights()), wire)
            receipts: list[Receipt] = await self._everywhere("begin", version)
        finally:
            if not self._paused:
                await self._everywhere("resume")
        self._version, self._updated = version, True
        odd = next((receipt for receipt in receipts if receipt.resident != receipts[0].resident), receipts[0])
        digests = await asyncio.to_thread(digests_of, wire)
        stale = sum(receipt.num_stale_tokens for receipt in receipts)
        size = sum(tensor.nbytes for _, tensor in wire)
        return replace(odd, wire=digests, size_bytes=size, num_stale_tokens=stale)

    async def busy_s(self) -> float:
        return sum(await self._everywhere("busy_s"))

    async def close(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Close without an event loop. A second time it does nothing."""
        copies, self._copies = self._copies, []
        for found in copies:
            found.end()

    def _home_of(self, conversation: str) -> _Process:
        for found in self._copies:
            if conversation in found.conversations:
                return found
        if not self._copies:
            raise EngineFailed(CLOSED)
        return min(self._copies, key=lambda found: found.load)

    async def _everywhere(self, method: str, *arguments: object) -> list[Any]:
        return list(await asyncio.gather(*(found.call(method, *arguments) for found in self._copies)))
