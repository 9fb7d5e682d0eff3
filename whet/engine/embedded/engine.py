"""The embedded engine: `EngineCore` behind the engine seam, its steps on a thread so that tools and rewards go on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby

from torch import Tensor

from whet.engine.base import Capabilities, EngineFailed, EngineHealth, EngineRefused, StaleCache
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import NO_TOKENIZER, EngineCore, Progressed
from whet.engine.embedded.grammar import Matching
from whet.engine.embedded.lockstep import Lockstep
from whet.engine.embedded.runner import Runner
from whet.engine.embedded.scheduler import Sequence
from whet.engine.embedded.tokenizer import EngineTokenizer
from whet.model.causal import CausalModel
from whet.model.digest import digests_of
from whet.transport.apply import Arrived, copy_weights
from whet.transport.base import Stream
from whet.types import Chunk, Finish, Receipt, ReplyLatency, Request, Scored
from whet.types.columns import Floats, Ints, Ragged
from whet.types.routes import Routes


@dataclass(slots=True, eq=False)
class _Call:
    """A request being served: its sequence and where its chunks go."""

    request: Request
    chunks: asyncio.Queue[Chunk | EngineFailed | EngineRefused] = field(default_factory=asyncio.Queue)
    matching: Matching | None = None
    """Initial state of its reply in its grammar."""
    ready: bool = False
    """True once it may be queued; before that its grammar is being read."""
    sequence: Sequence | None = None
    began_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None

    @property
    def latency(self) -> ReplyLatency | None:
        """Latency of a reply that ends now; None: it has no token."""
        admitted_at = None if self.sequence is None else self.sequence.admitted_at
        if admitted_at is None or self.first_token_at is None:
            return None
        return ReplyLatency(admitted_at - self.began_at, self.first_token_at - admitted_at, time.monotonic() - self.first_token_at)


class EmbeddedEngine:
    """An `Engine` in this process.

    Its runner alone touches the core, so a method here that changes the core posts the change, to be
    made between two steps.

    Args:
        model: the weights it samples from; if they are the trainer's, `update` moves no bytes.
        config: sizes.
        thread: runs the steps; one thread, shared with the trainer, so that the two never compute at
            once.
        shares_weights: True if `model` is the trainer's.
        deterministic: no step is taken while an open conversation has no request with the engine, so
            that the requests that share a step do not depend on the duration of a tool call.
        keeps_weights: keep the engine's own weights in memory while it sleeps, since updates bring only
            changes.
        tokenizer, ranks: as for `EngineCore`.
    """

    def __init__(
        self,
        model: CausalModel,
        config: EmbeddedConfig,
        thread: Executor,
        *,
        shares_weights: bool,
        deterministic: bool,
        keeps_weights: bool = False,
        tokenizer: EngineTokenizer = NO_TOKENIZER,
        ranks: Lockstep | None = None,
    ) -> None:
        self.core = EngineCore(model, config, tokenizer, ranks)
        self._capabilities = Capabilities(self.core.max_tokens, shares_weights, deterministic)
        self._runner = Runner(self, thread)
        self._readers = ThreadPoolExecutor(1, "grammars")
        """Thread that reads grammars: a single one, made for the first grammar, so that requests keep
        their order."""
        self._calls: dict[str, _Call] = {}
        self._open: set[str] = set()
        self._paused = False
        self._asleep = False
        self._gives_weights_back = not (shares_weights or keeps_weights)
        self._updated = False
        """True once weights were published to it; until then it holds its initial weights, as version
        0."""
        self._torn: str | None = None
        """Why it holds half of a version, if it does: nothing is sampled from it then."""

    @property
    def version(self) -> int:
        return self.core.version

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def held(self) -> int | None:
        """The version that it holds whole; None: none is."""
        return None if self._torn or (self._asleep and self._gives_weights_back) else self.version

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def open(self, conversation: str) -> None:
        self._open.add(conversation)

    def release(self, conversation: str) -> None:
        self._open.discard(conversation)
        self._runner.kick()  # the requests that waited for it may go on
        if self._capabilities.deterministic and not self._open:  # what an evaluation cached must not change the next rollout's steps
            self._runner.post(self.core.drop_caches)

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self._runner.check_open()
        self._check_whole()
        self.core.check(request.id, request.tokens, request.sampling.max_tokens)
        self.core.check_sampling(request)
        if request.id in self._calls:
            raise ValueError(f"a request with the id {request.id!r} is already running")
        call = _Call(request)
        self._calls[request.id] = call
        try:
            if request.sampling.grammar is not None:
                reading = asyncio.get_running_loop().run_in_executor(self._readers, self.core.begin_grammar, request)
                call.matching = await reading
            call.ready = True
            self._runner.post(lambda: self._start(call))
            while True:
                chunk = await call.chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            if self._serves(call):  # the consumer went away early
                del self._calls[request.id]
                self._runner.post(lambda: self._retire(call))

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            self._runner.post(lambda: self._end(call, Finish.ABORT))

    async def pause(self) -> None:
        self._paused = True
        await self._runner.settle()

    async def resume(self) -> None:
        self._paused = False
        self._runner.kick()

    async def score(self, tokens: Ints, temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        if temperature <= 0:
            raise ValueError(f"scoring needs a temperature above 0, not {temperature}")
        self.core.check("score", tokens, 0)
        return await self._runner.between_steps(lambda: self._score(tokens, temperature, top_logprobs), is_step=True)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        return await self._runner.between_steps(lambda: self._take_over(weights, version))

    async def digests(self) -> dict[str, str]:
        """Digest of each tensor that it now holds, as `Receipt.resident`."""
        return await self._runner.between_steps(self._digests)

    async def flush(self) -> None:
        await self._runner.between_steps(self.core.forget)

    async def sleep(self) -> None:
        await self._runner.between_steps(self._sleep)

    async def busy_s(self) -> float:
        return self._runner.busy_s

    async def health(self) -> EngineHealth:
        """Health of the engine: answered between two steps and during one."""
        return EngineHealth(self._runner.busy_s, self._runner.step_s)

    async def close(self) -> None:
        """End everything: a running step is waited for, every open request and call gets an `EngineFailed`."""
        await self._runner.close()
        self._readers.shutdown(wait=False, cancel_futures=True)

    # What the runner drives.

    def may_step(self) -> bool:
        return self.core.has_work and not (self._paused or self._asleep or self._torn or self._someone_is_away())

    def step(self) -> list[Progressed]:
        with self.core.ranks.together():
            return self.core.step()

    def landed(self, result: list[Progressed]) -> None:
        for item in result:
            self._hand_out(item)

    def failed(self, reason: str, cause: BaseException | None) -> None:
        """End every request that has started with an error; results of the unfinished step are never
        read."""
        for call in [call for call in self._calls.values() if call.sequence is not None]:
            kind = StaleCache if isinstance(cause, StaleCache) else EngineFailed
            error = kind(f"request {call.request.id}: {reason}")
            error.__cause__ = cause
            del self._calls[call.request.id]
            self._retire(call)
            call.chunks.put_nowait(error)
        self.core.forget()

    # What it applies between two steps.

    def _serves(self, call: _Call) -> bool:
        return self._calls.get(call.request.id) is call

    def _start(self, call: _Call) -> None:
        if self._serves(call):
            call.sequence = self.core.add(call.request, call.matching)

    def _end(self, call: _Call, finish: Finish) -> None:
        if self._serves(call):
            del self._calls[call.request.id]
            self._deliver(call, finish)
            self._retire(call)

    def _retire(self, call: _Call) -> None:
        """Take a call's sequence out of the core."""
        if call.sequence is not None:
            self.core.finish(call.sequence)
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
                raw, top = Floats(sequence.raw_logprobs[span]), tuple(sequence.top_logprobs[span])
                kept, found = Ragged(sequence.nucleus[span]), sequence.num_prefix_hits or 0
                routes = self._routes(sequence, span)
                chunks.append(Chunk(Ints(sampled[span]), Floats(sequence.logprobs[span]), version, None, raw, top, kept, routes, found))
            sequence.delivered = sequence.num_sampled
        if finish is not None:
            found = 0 if sequence is None else sequence.num_prefix_hits or 0
            last = chunks.pop() if chunks else Chunk(Ints(), Floats(), self.version, num_cached=found)
            chunks.append(replace(last, finish=finish, latency=call.latency))
        for chunk in chunks:
            call.chunks.put_nowait(chunk)

    def _routes(self, sequence: Sequence, span: slice) -> Routes:
        """Experts that come with some of a sequence's sampled tokens."""
        if not sequence.request.sampling.routes:
            return Routes()
        assert self.core.routes is not None, "the core began to note experts with the first request for them"
        start = sequence.num_prompt + span.start if span.start else sequence.request.routes_from
        return self.core.routes.entries(sequence, start, sequence.num_prompt + span.stop)

    def _hand_out(self, item: Progressed) -> None:
        sequence = item.sequence
        call = self._calls.get(sequence.request.id)
        if call is None or call.sequence is not sequence:
            return  # abandoned during the step
        if call.first_token_at is None:
            call.first_token_at = time.monotonic()
        if item.failure is not None:
            del self._calls[call.request.id]
            self._retire(call)
            call.chunks.put_nowait(item.failure)
        elif item.finish is not None:
            self._end(call, item.finish)
        elif 0 < call.request.chunk_tokens <= sequence.num_sampled - sequence.delivered:
            self._deliver(call, None)

    def _someone_is_away(self) -> bool:
        if not self._capabilities.deterministic:
            return False
        return not self._open <= {call.request.conversation for call in self._calls.values() if call.ready}

    def _check_whole(self) -> None:
        if self._torn:
            raise EngineFailed(self._torn)

    def _score(self, tokens: Ints, temperature: float, top_logprobs: int) -> Scored:
        self._check_whole()
        if self._asleep:
            raise EngineFailed("the engine sleeps until it is given weights, and scores nothing before")
        with self.core.ranks.together():
            return self.core.score(tokens, temperature, top_logprobs)

    def _sleep(self) -> None:
        self._asleep = True
        with self.core.ranks.together():
            self.core.sleep(self._gives_weights_back)

    def _take_over(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        if self._updated and version <= self.version:
            raise ValueError(f"the engine holds version {self.version} already, and was asked to take over version {version}")
        began = time.perf_counter()
        self.core.wake()
        own = dict(self.core.model.named_weights())
        kept = self._capabilities.shares_weights
        arrived = None if kept else self._copy(own, weights, version)
        wire = list(weights) if arrived is None else []
        self.core.begin_version(version)
        self._updated, self._asleep = True, False
        resident = self._digests()
        if arrived is None:
            same = all(own.get(name) is tensor for name, tensor in wire)
            digests = {name: resident[name] for name, _ in wire} if same else digests_of(wire)
            arrived = Arrived(digests, sum(tensor.nbytes for _, tensor in wire))
        return Receipt(
            version=version,
            wire=arrived.digests,
            resident=resident,
            size_bytes=arrived.size_bytes,
            num_stale_tokens=self.core.num_cached_tokens,
            wire_bytes=0 if kept else arrived.size_bytes,
            load_s=time.perf_counter() - began,
        )

    def _digests(self) -> dict[str, str]:
        with self.core.ranks.together():
            return dict(self.core.ranks.digests(self.core.model))

    def _copy(self, own: dict[str, Tensor], weights: Iterable[tuple[str, Tensor]], version: int) -> Arrived:
        """Copy what arrives into the engine's own weights; a stream that breaks off in the middle leaves it unable to sample."""
        try:
            arrived = copy_weights(own, weights)
        except BaseException:
            if isinstance(weights, Stream):
                self._torn = f"the engine holds half of version {version}, which did not arrive whole, and samples nothing"
            raise
        self._torn = None
        return arrived
