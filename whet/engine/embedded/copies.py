"""Copies of the embedded engine in processes of their own, which share one set of weights: sampling on more cores or devices."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
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
from whet.engine.embedded.weights import copy_weights
from whet.engine.embedded.worker import Setup
from whet.model.causal import CausalModel
from whet.model.digest import digests_of
from whet.model.shared import share
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
    ) -> None:
        ranks = config.tensor_parallel
        if ranks > 1:
            check_split(model, ranks)
        self._model = model
        threads = max(1, torch.get_num_threads() // len(devices))
        shared = share(model)
        self._copies: list[CopyProcess] = []
        self._meeting = Path(tempfile.mkdtemp(prefix="whet-ranks-"))
        try:
            setup = Setup(shared, config, devices[0], deterministic, threads, tokenizer, trust_remote_code)
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
