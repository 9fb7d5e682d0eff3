"""Copies of the embedded engine in processes of their own, which share one set of weights: sampling on more cores or devices."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.engine.base import Capabilities, EngineFailed
from whet.engine.embedded.engine import EmbeddedConfig
from whet.engine.embedded.launch import Launcher, LocalLauncher
from whet.engine.embedded.processes import CopyProcess
from whet.engine.embedded.ranks import check_split
from whet.engine.embedded.runner import CLOSED
from whet.engine.embedded.worker import Setup
from whet.model.causal import CausalModel
from whet.model.shared import share
from whet.transport.base import Sender, Stream
from whet.transport.carry import carry
from whet.transport.land import whole_set
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig, Syncing
from whet.types import Chunk, Receipt, Request, Scored


class EngineCopies:
    """An `Engine` of several embedded ones. A conversation stays with the copy that it began with, new ones go where the fewest are.

    Args:
        model: its tensors are moved into memory that the copies share, so it must be nobody else's. In the CPU's memory.
        config: sizes of each copy, and how many there are.
        devices: where each copy computes, or each rank of the first, then of the next.
        deterministic: as for the embedded engine; which conversation is whose goes by the order in which they were opened.
        tokenizer: folder of a tokenizer to find stop texts with.
        trust_remote_code: whether code that comes with the tokenizer may run.
        launcher: starts the copies' processes; none: on this machine.
        sync: how new weights reach the copies; None: through memory.

    Raises:
        EngineFailed: if a copy does not start.
        ValueError: if the model cannot be cut over the ranks of a copy.
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
        launcher: Launcher | None = None,
        sync: Syncing | None = None,
    ) -> None:
        ranks = config.tensor_parallel
        if ranks > 1:
            check_split(model, ranks)
        sync, self._shapes = sync or Syncing(SyncConfig(), Path()), dict(model.named_weights())
        threads = max(1, torch.get_num_threads() // len(devices))
        shared = share(model)
        self._copies: list[CopyProcess] = []
        self._sender: Sender | None = None
        self._meeting = Path(tempfile.mkdtemp(prefix="whet-ranks-"))
        try:
            setup = Setup(shared, config, devices[0], deterministic, threads, tokenizer, trust_remote_code, sync.config.is_mapped)
            for i in range(len(devices) // ranks):
                mine = devices[i * ranks : (i + 1) * ranks]
                self._copies.append(CopyProcess(f"engine copy {i}", setup, mine, self._meeting / str(i), launcher or LocalLauncher()))
            first, *_ = [found.ready() for found in self._copies]
        except BaseException:
            self.end()
            raise
        finally:
            shared.path.unlink()
        self._capabilities = replace(first, shares_weights=False)
        self._sender = sender_of(sync.config, model, sync.folder)
        self._version, self._updated, self._paused = 0, False, False
        self._torn: str | None = None
        """Why the copies hold half of a version, if they do: nothing is sampled then."""

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
        if self._torn:
            raise EngineFailed(self._torn)
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
        """All copies stand still while they take new weights over. The receipt has the answer of each."""
        if self._updated and version <= self._version:
            raise ValueError(f"the engine holds version {self._version} already, and was told to take over version {version}")
        if not isinstance(weights, Stream):
            weights = whole_set(self._shapes, weights)
        began = time.perf_counter()
        await self._everywhere("pause")
        try:
            loads = {found.name: partial(found.call, "begin", version) for found in self._copies}
            processes = [name for found in self._copies for name in found.processes]
            assert self._sender is not None
            carried = await carry(self._sender, weights, version, loads, processes)
        except BaseException as error:
            self._torn = f"the copies hold half of version {version}, and sample nothing: {error}"
            raise
        self._torn = None
        await self._go_on()
        self._version, self._updated = version, True
        members = tuple(replace(answer, engine=found.name) for found, answer in zip(self._copies, carried.receipts, strict=True))
        return replace(
            members[0],
            engine="the engine",
            members=members,
            num_stale_tokens=sum(answer.num_stale_tokens for answer in members),
            wire_bytes=carried.sent.size_bytes,
            encode_s=carried.sent.encode_s,
            wire_s=carried.sent.wire_s,
            load_s=max(answer.load_s for answer in members),
            pause_s=time.perf_counter() - began,
        )

    async def _go_on(self) -> None:
        if not self._paused:
            await self._everywhere("resume")

    async def busy_s(self) -> float:
        return sum(await self._everywhere("busy_s"))

    async def close(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Close without an event loop. A second time it does nothing."""
        copies, self._copies = self._copies, []
        if self._sender is not None:
            self._sender.close()
        for found in copies:
            found.end()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _home_of(self, conversation: str) -> CopyProcess:
        for found in self._copies:
            if conversation in found.conversations:
                return found
        if not self._copies:
            raise EngineFailed(CLOSED)
        return min(self._copies, key=lambda found: found.load)

    async def _everywhere(self, method: str, *arguments: object) -> list[Any]:
        return list(await asyncio.gather(*(found.call(method, *arguments) for found in self._copies)))
