"""The embedded engine: `EngineCore` behind the engine seam, its steps on a thread so that tools and rewards go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor

from whet.config import Config
from whet.engine.base import Capabilities, EngineRefused
from whet.engine.embedded.core import EngineCore, Progressed
from whet.engine.embedded.scheduler import Sequence
from whet.model.causal import CausalModel
from whet.model.digest import digest_of
from whet.types import Chunk, Finish, Receipt, Request

T = TypeVar("T")


class EmbeddedConfig(Config):
    """The engine that runs in the trainer's own process."""

    cache_tokens: int = Field(default=65_536, gt=0)
    """Tokens that the KV cache holds, over all sequences."""
    block_size: int = Field(default=16, gt=0)
    """Tokens per cache block."""
    max_running: int = Field(default=128, gt=0)
    """Sequences that run at a time; more wait."""
    max_batch_tokens: int = Field(default=8192, gt=0)
    """Tokens that one step computes at most: long prompts are prefilled in chunks, mixed with decoding."""


@dataclass(slots=True)
class _Call:
    """A request being served: its sequence and where its chunks go."""

    request: Request
    chunks: asyncio.Queue[Chunk | BaseException] = field(default_factory=asyncio.Queue)
    sequence: Sequence | None = None


class EmbeddedEngine:
    """An `Engine` in this process.

    Only the runner task touches the core: calls from the event loop are put into an inbox and applied between two steps.

    Args:
        model: the weights it samples from; when they are the trainer's, `update` moves no bytes.
        config: sizes.
        thread: where steps run; one thread, shared with the trainer, so that the two never compute at once.
        shares_weights: whether `model` is the trainer's.
        deterministic: no step is taken while an open conversation has no request with the engine, so that which requests
            share a step does not depend on how long a tool took.
    """

    def __init__(
        self,
        model: CausalModel,
        config: EmbeddedConfig,
        thread: Executor,
        *,
        shares_weights: bool,
        deterministic: bool,
    ) -> None:
        self.core = EngineCore(
            model,
            cache_tokens=config.cache_tokens,
            block_size=config.block_size,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
        )
        limit = min(self.core.scheduler.max_tokens, model.max_positions or self.core.scheduler.max_tokens)
        self._capabilities = Capabilities(limit, shares_weights, deterministic)
        self._thread = thread
        self._calls: dict[str, _Call] = {}
        self._open: set[str] = set()
        self._inbox: list[Callable[[], object]] = []
        self._wake = asyncio.Event()
        self._paused = False
        self._runner: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self.core.version

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def open(self, conversation: str) -> None:
        self._open.add(conversation)

    def release(self, conversation: str) -> None:
        self._open.discard(conversation)
        self._post(lambda: self.core.scheduler.release(conversation))

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        if request.id in self._calls:
            raise ValueError(f"a request with the id {request.id!r} is already running")
        call = _Call(request)
        self._calls[request.id] = call
        self._post(lambda: self._start(call))
        try:
            while True:
                chunk = await call.chunks.get()
                if isinstance(chunk, BaseException):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            if request.id in self._calls:  # the consumer went away early
                self._post(lambda: self._end(call, Finish.ABORT))

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            self._post(lambda: self._end(call, Finish.ABORT))

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        return await self._between_steps(lambda: self.core.score(tokens, temperature))

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        return await self._between_steps(lambda: self._take_over(weights, version))

    async def sleep(self) -> None:
        await self._between_steps(self._forget)

    async def wake(self) -> None:
        """Nothing to do: the cache's tensors come back with the first step."""

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
            self._runner = None

    # Applied by the runner, between steps.

    def _start(self, call: _Call) -> None:
        limit = self._capabilities.max_tokens
        longest = len(call.request.tokens) + call.request.sampling.max_tokens
        try:
            if longest > limit:
                raise EngineRefused(
                    f"request {call.request.id} may reach {longest} tokens, over the limit of {limit} (the model's positions or the "
                    "cache): lower the token limits or raise engine.cache_tokens"
                )
            call.sequence = self.core.add(call.request)
        except ValueError as error:
            del self._calls[call.request.id]
            call.chunks.put_nowait(error)

    def _end(self, call: _Call, finish: Finish) -> None:
        if self._calls.pop(call.request.id, None) is None:
            return
        if call.sequence is None:
            call.chunks.put_nowait(Chunk((), (), self.version, finish))
            return
        self._deliver(call, finish)
        self.core.scheduler.finish(call.sequence, keep=call.request.conversation in self._open)

    def _take_over(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        wire: list[tuple[str, Tensor]] = []
        own = dict(self.core.model.named_weights())
        if self._capabilities.shares_weights:
            wire = list(weights)
        else:
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(tensor)
                    wire.append((name, tensor))
        for call in self._calls.values():  # what the old policy sampled goes out under its own version
            if call.sequence is not None:
                self._deliver(call, None)
        self.core.drop_caches()
        self.core.version = version
        return Receipt(
            version=version,
            wire_digest=digest_of(wire),
            resident_digest=digest_of(own.items()),
            num_tensors=len(wire),
            size_bytes=sum(t.nbytes for _, t in wire),
        )

    def _forget(self) -> None:
        self.core.drop_caches()
        self.core.store.clear()

    def _deliver(self, call: _Call, finish: Finish | None) -> None:
        sequence = call.sequence
        assert sequence is not None
        first = sequence.delivered
        if first == sequence.num_sampled and finish is None:
            return
        tokens = tuple(sequence.tokens[sequence.num_prompt + first :])
        version = sequence.versions[first] if tokens else self.version
        call.chunks.put_nowait(Chunk(tokens, tuple(sequence.logprobs[first:]), version, finish))
        sequence.delivered = sequence.num_sampled

    # The runner.

    def _post(self, action: Callable[[], object]) -> None:
        self._inbox.append(action)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run(), name="engine")
        self._wake.set()

    async def _between_steps(self, action: Callable[[], T]) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                done.set_result(await asyncio.get_running_loop().run_in_executor(self._thread, action))
            except Exception as error:
                done.set_exception(error)

        self._post(run)
        return await done

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._inbox:
                posted = self._inbox.pop(0)()
                if asyncio.iscoroutine(posted):
                    await posted
            if self._paused or not self.core.has_work or self._someone_is_away():
                continue
            try:
                progressed = await loop.run_in_executor(self._thread, self.core.step)
            except Exception as error:
                self._fail(error)
                continue
            for item in progressed:
                self._after_token(item)
            self._wake.set()

    def _someone_is_away(self) -> bool:
        if not self._capabilities.deterministic:
            return False
        here = {call.request.conversation for call in self._calls.values()}
        return not self._open <= here

    def _after_token(self, item: Progressed) -> None:
        call = self._calls.get(item.sequence.request.id)
        if call is None:
            return
        if item.finish is not None:
            self._end(call, item.finish)
        elif call.request.chunk_tokens and item.sequence.num_sampled - item.sequence.delivered >= call.request.chunk_tokens:
            self._deliver(call, None)

    def _fail(self, error: Exception) -> None:
        """A step that raises ends every request with that error: nobody waits for an answer that will not come."""
        for call in list(self._calls.values()):
            del self._calls[call.request.id]
            if call.sequence is not None:
                self.core.scheduler.finish(call.sequence, keep=False)
            call.chunks.put_nowait(error)
