"""The embedded engine: `EngineCore` behind the engine seam, its steps on a thread so that tools and rewards go on meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from whet.config import Config
from whet.engine.base import Capabilities, EngineFailed
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


@dataclass(slots=True, eq=False)
class _Call:
    """A request being served: its sequence and where its chunks go."""

    request: Request
    chunks: asyncio.Queue[Chunk | EngineFailed] = field(default_factory=asyncio.Queue)
    sequence: Sequence | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """Work for the thread between two steps, and who waits for it."""

    work: Callable[[], Any]
    done: asyncio.Future[Any]


class EmbeddedEngine:
    """An `Engine` in this process.

    The runner task alone touches the core: on the event loop between two steps, where it first applies what was posted, and on the
    thread during a step. It lives only while there is something to do, so an idle engine is bound to no event loop.

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
        self._capabilities = Capabilities(self.core.max_tokens, shares_weights, deterministic)
        self._thread = thread
        self._calls: dict[str, _Call] = {}
        self._open: set[str] = set()
        self._posted: deque[Callable[[], None]] = deque()
        self._jobs: deque[_Job] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._flight: Future[Any] | None = None
        self._paused = self._asleep = self._closed = False

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
        self._check_open()
        self.core.check(request.id, request.tokens, request.sampling.max_tokens)
        if request.id in self._calls:
            raise ValueError(f"a request with the id {request.id!r} is already running")
        call = _Call(request)
        self._calls[request.id] = call
        self._post(lambda: self._start(call))
        try:
            while True:
                chunk = await call.chunks.get()
                if isinstance(chunk, EngineFailed):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            if self._serves(call):  # the consumer went away early
                del self._calls[request.id]
                self._post(lambda: self._retire(call))

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            self._post(lambda: self._end(call, Finish.ABORT))

    async def pause(self) -> None:
        self._paused = True
        if self._flight is not None:
            await asyncio.wait([asyncio.wrap_future(self._flight)])

    async def resume(self) -> None:
        self._paused = False
        self._kick()

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        if self._asleep:
            raise ValueError("the engine sleeps: wake it before it scores anything")
        if temperature <= 0:
            raise ValueError(f"scoring needs a temperature above 0, not {temperature}")
        self.core.check("score", tokens, 0)
        return await self._between_steps(lambda: self.core.score(tokens, temperature))

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        return await self._between_steps(lambda: self._take_over(weights, version))

    async def sleep(self) -> None:
        """Takes no step until `wake`, and keeps the requests: what they lost is computed again then."""
        self._asleep = True
        await self._between_steps(self.core.forget)

    async def wake(self) -> None:
        """The cache's tensors come back with the next step."""
        self._asleep = False
        self._kick()

    async def close(self) -> None:
        """End everything: a running step is waited for, every open request and call gets an `EngineFailed`."""
        self._closed = True
        if self._runner is not None and not self._runner.done():
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self._fail_all("the engine was closed")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineFailed("the engine is closed")

    def _serves(self, call: _Call) -> bool:
        return self._calls.get(call.request.id) is call

    # What the runner applies between two steps.

    def _start(self, call: _Call) -> None:
        if self._serves(call):
            call.sequence = self.core.add(call.request)

    def _end(self, call: _Call, finish: Finish) -> None:
        if self._serves(call):
            del self._calls[call.request.id]
            self._deliver(call, finish)
            self._retire(call)

    def _retire(self, call: _Call) -> None:
        """Take a call's sequence out of the core."""
        if call.sequence is not None:
            self.core.scheduler.finish(call.sequence, keep=call.request.conversation in self._open)
            call.sequence = None

    def _deliver(self, call: _Call, finish: Finish | None) -> None:
        """Hand out what was sampled since the last time, one chunk for each policy version; the last carries `finish`."""
        chunks: list[Chunk] = []
        sequence = call.sequence
        if sequence is not None:
            sampled = sequence.tokens[sequence.num_prompt :]
            news = range(sequence.delivered, sequence.num_sampled)
            for version, run in groupby(news, key=sequence.versions.__getitem__):
                places = list(run)
                span = slice(places[0], places[-1] + 1)
                chunks.append(Chunk(tuple(sampled[span]), tuple(sequence.logprobs[span]), version))
            sequence.delivered = sequence.num_sampled
        if finish is not None:
            last = chunks.pop() if chunks else Chunk((), (), self.version)
            chunks.append(replace(last, finish=finish))
        for chunk in chunks:
            call.chunks.put_nowait(chunk)

    def _fail_calls(self, reason: str, cause: BaseException | None = None) -> None:
        """End every request that has begun with an error, so that nobody waits for an answer that will not come."""
        for call in [call for call in self._calls.values() if call.sequence is not None]:
            error = EngineFailed(f"request {call.request.id}: {reason}")
            error.__cause__ = cause
            del self._calls[call.request.id]
            self._retire(call)
            call.chunks.put_nowait(error)
        self.core.forget()

    def _fail_all(self, reason: str) -> None:
        self._apply_posted()
        self._fail_calls(reason)
        while self._jobs:
            job = self._jobs.popleft()
            if not job.done.done():
                job.done.set_exception(EngineFailed(reason))

    # Between the event loop and the thread.

    def _take_over(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        wire = list(weights)
        own = dict(self.core.model.named_weights())
        if not self._capabilities.shares_weights:
            _copy(own, wire)
        self.core.drop_caches()
        self.core.version = version
        return Receipt(
            version=version,
            wire_digest=digest_of(wire),
            resident_digest=digest_of(own.items()),
            num_tensors=len(wire),
            size_bytes=sum(t.nbytes for _, t in wire),
        )

    async def _between_steps(self, work: Callable[[], T]) -> T:
        self._check_open()
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._kick()
        return await job.done

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self._kick()

    def _kick(self) -> None:
        """See that the runner looks again."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a release after the loop has ended: it is applied with the next request
            return
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run(), name="engine")
        elif self._runner.get_loop() is not loop:
            raise RuntimeError("the engine still serves another event loop: end its requests or close the engine there")

    async def _run(self) -> None:
        """Serve until there is nothing to do."""
        try:
            while True:
                self._apply_posted()
                if self._jobs:
                    await self._do_job()
                elif self._may_step():
                    await self._step()
                else:
                    return
        except asyncio.CancelledError:  # by close(), or with its event loop
            self._fail_all("the engine was closed")
            raise

    def _apply_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _may_step(self) -> bool:
        return self.core.has_work and not (self._paused or self._asleep or self._someone_is_away())

    def _someone_is_away(self) -> bool:
        if not self._capabilities.deterministic:
            return False
        return not self._open <= {call.request.conversation for call in self._calls.values()}

    async def _step(self) -> None:
        try:
            progressed = await self._on_thread(self.core.step)
        except Exception as error:  # whatever a model can raise; what it left half done is never read
            self._fail_calls(f"a step failed: {type(error).__name__}: {error}", error)
            return
        for item in progressed:
            self._hand_out(item)

    def _hand_out(self, item: Progressed) -> None:
        sequence = item.sequence
        call = self._calls.get(sequence.request.id)
        if call is None or call.sequence is not sequence:
            return  # abandoned during the step
        if item.finish is not None:
            self._end(call, item.finish)
        elif 0 < call.request.chunk_tokens <= sequence.num_sampled - sequence.delivered:
            self._deliver(call, None)

    async def _do_job(self) -> None:
        job = self._jobs[0]  # stays in the queue meanwhile: should the runner be cancelled, its waiter is told
        if not job.done.done():
            await self._answer(job)
        self._jobs.popleft()

    async def _answer(self, job: _Job) -> None:
        try:
            result, error = await self._on_thread(job.work), None
        except Exception as fault:  # belongs to whoever asked
            result, error = None, fault
        if job.done.done():  # nobody waits any more
            return
        if error is None:
            job.done.set_result(result)
        else:
            job.done.set_exception(error)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Run on the thread. When cancelled it still waits for work that has begun: nothing touches the core meanwhile."""
        flight = self._flight = self._thread.submit(work)
        try:
            return await asyncio.wrap_future(flight)
        except asyncio.CancelledError:
            if not flight.cancel():
                await asyncio.wait([asyncio.wrap_future(flight)])
            raise
        finally:
            self._flight = None


def _copy(own: dict[str, Tensor], wire: list[tuple[str, Tensor]]) -> None:
    """Copy arrived weights into the engine's own, all or none.

    Raises:
        ValueError: naming the weights that are missing, unknown, or of another shape.
    """
    arrived = {name: tensor.shape for name, tensor in wire}
    wrong = sorted(name for name in own.keys() | arrived if name not in own or own[name].shape != arrived.get(name))
    if wrong:
        raise ValueError(
            f"weights that are missing, unknown or of another shape than the engine's ({len(wrong)}): {', '.join(wrong[:5])}"
        )
    with torch.no_grad():
        for name, tensor in wire:
            own[name].copy_(tensor)
