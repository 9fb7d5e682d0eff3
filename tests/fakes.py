"""An engine whose replies are scripted, and the same as a member of a pool: they sample nothing, load nothing, and wait for no clock."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from whet.engine.base import Capabilities, EngineFailed, EngineHealth, EngineLost, EngineRefused
from whet.model.digest import digests_of
from whet.transport.base import Sent, SentOnce, SharedTicket
from whet.types import Chunk, Finish, Receipt, Request, Scored

NEVER = 10**9
HANG = "hang"
"""The engine samples nothing more of the reply until it is aborted."""
DEAF = "deaf"
"""The engine samples nothing more of the reply, and does not answer an abort either."""

Script = Callable[[Request], Iterable[Any]]
"""Items of a reply, in order: a token with its log-prob, which the engine hands over in chunks as the request asks; a chunk, handed over as
it is; a `Finish`, which ends the reply; an exception to raise; an event to wait for; HANG or DEAF."""


def drawn(seed: int, place: int) -> int:
    """The token of a place, as if it were drawn with a seed."""
    return (seed * 1000 + place * 7) % 97


def by_place(request: Request) -> Iterable[Any]:
    """Script of an endless reply, whose tokens depend on the seed and on their place alone."""
    for place in itertools.count(len(request.tokens)):
        token = drawn(request.sampling.seed, place)
        yield token, -float(token)


def repeats(tokens: Iterable[int]) -> Script:
    """Script of one reply to every request, which goes on where the request does."""
    items = [(token, -0.01 * (place + 1)) for place, token in enumerate(tokens)]
    return lambda request: [*items[request.num_begun :], Finish.STOP]


@dataclass(slots=True, eq=False)
class _Call:
    request: Request
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    num_sampled: int = 0
    pending: list[tuple[int, float, int]] = field(default_factory=list)
    """Token, log-prob and version of each token that is not handed over yet."""

    def hand_over(self, version: int, finish: Finish | None = None) -> Iterable[Chunk]:
        """The pending tokens, one chunk for each version; the last one carries `finish`."""
        runs = [list(run) for _, run in itertools.groupby(self.pending, key=lambda each: each[2])]
        self.pending.clear()
        for i, run in enumerate(runs):
            tokens, logprobs = tuple(token for token, _, _ in run), tuple(logprob for _, logprob, _ in run)
            raw = logprobs if self.request.sampling.raw_logprobs else ()
            yield Chunk(tokens, logprobs, run[0][2], finish if i == len(runs) - 1 else None, raw, ((),) * len(raw))
        if finish is not None and not runs:
            yield Chunk((), (), version, finish)


@dataclass(eq=False)
class FakeEngine:
    """An `Engine` that plays a script, a token at a time: `tests/engine/test_engine_conformance.py` holds it to the protocol."""

    script: Script = by_place
    version: int = 0
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(10_000, False, False))
    holds: dict[str, int] = field(default_factory=dict)
    """Conversations that get no more than so many tokens of a reply."""
    requests: list[Request] = field(default_factory=list)
    sampled: list[str] = field(default_factory=list)
    """The conversation of each token."""
    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    """Every chunk that was handed over, with its conversation."""
    opened: Counter[str] = field(default_factory=Counter)
    released: Counter[str] = field(default_factory=Counter)
    weights: Any = None
    """The newest weights that it was given, by name."""
    paused: bool = False
    pace_s: float = 0.0
    """Seconds from one token to the next."""
    asleep: bool = False
    closed: bool = False
    calls: dict[str, _Call] = field(default_factory=dict)
    _updated: bool = False

    @property
    def running(self) -> set[str]:
        """Ids of the requests that run."""
        return set(self.calls)

    @property
    def begun(self) -> list[str]:
        """The conversation of each request."""
        return [request.conversation for request in self.requests]

    def open(self, conversation: str) -> None:
        self.opened[conversation] += 1

    def release(self, conversation: str) -> None:
        self.released[conversation] += 1
        assert all(call.request.conversation != conversation for call in self.calls.values()), "released while it generates"

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self._check(request)
        self.requests.append(request)
        call = self.calls[request.id] = _Call(request)
        try:
            async for chunk in self._reply(call):
                self.chunks.append((request.conversation, chunk))
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            try:
                for _ in range(20):  # taking a request out takes a while: a caller that does not wait for it shows
                    await asyncio.sleep(0)
            finally:
                del self.calls[request.id]

    async def abort(self, request_id: str) -> None:
        if request_id in self.calls:
            self.calls[request_id].aborted.set()

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        self._check_open()
        if self.asleep:
            raise EngineFailed("the engine sleeps")
        logprobs = tuple(-float(token) / temperature for token in tokens[1:])
        return Scored(logprobs, tuple(((0, 0.0),) * top_logprobs for _ in logprobs) if top_logprobs else ())

    async def pause(self) -> None:
        self._check_open()
        self.paused = True

    async def resume(self) -> None:
        self._check_open()
        self.paused = False

    async def update(self, weights: Iterable[tuple[str, Any]], version: int) -> Receipt:
        self._check_open()
        if self._updated and version <= self.version:
            raise ValueError(f"the engine holds version {self.version} already, and was asked to take over version {version}")
        self.weights = dict(weights)
        digests = {name: digests_of([(name, w)])[name] if isinstance(w, Tensor) else str(w) for name, w in self.weights.items()}
        self.version, self._updated, self.asleep = version, True, False
        return Receipt(version, digests, digests)

    async def flush(self) -> None:
        self._check_open()

    async def sleep(self) -> None:
        self._check_open()
        self.asleep = True

    async def busy_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        self.closed = True
        while self.calls:
            await asyncio.sleep(0)

    def check_idle(self, *, reopened: bool = False) -> None:
        """Nothing was left open, and nothing was let go of twice; `reopened`: conversations may be opened again."""
        assert not self.calls
        assert self.opened == self.released
        assert reopened or set(self.opened.values()) <= {1}

    async def pace(self) -> None:
        """Wait between two tokens, and between two looks at what a reply waits for."""
        await asyncio.sleep(self.pace_s)

    def _check_open(self) -> None:
        if self.closed:
            raise EngineFailed("the engine was closed")

    def _check(self, request: Request) -> None:
        self._check_open()
        longest = len(request.tokens) + request.sampling.max_tokens
        if not request.tokens or longest > self.capabilities.max_tokens:
            raise EngineRefused(f"request {request.id}: {longest} tokens, over the limit of {self.capabilities.max_tokens}")
        if request.id in self.calls:
            raise ValueError(f"a request with the id {request.id!r} is already running")

    async def _reply(self, call: _Call) -> AsyncIterator[Chunk]:
        request = call.request
        for item in self.script(request):
            if not await self._may_go_on(call, item):
                for chunk in call.hand_over(self.version, Finish.ABORT):
                    yield chunk
                return
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, Chunk):
                yield item
            elif isinstance(item, Finish):
                for chunk in call.hand_over(self.version, item):
                    yield chunk
            elif isinstance(item, tuple):
                call.pending.append((*item, self.version))
                call.num_sampled += 1
                self.sampled.append(request.conversation)
                finish = self._finish_of(call, item[0])
                if finish is not None or 0 < request.chunk_tokens <= len(call.pending):
                    for chunk in call.hand_over(self.version, finish):
                        yield chunk

    async def _may_go_on(self, call: _Call, item: Any) -> bool:
        """Wait until the item's turn comes; false: the request was aborted."""
        await self.pace()
        while item == DEAF or (not call.aborted.is_set() and self._waits(call, item)):
            self._check_open()
            await self.pace()
        self._check_open()
        return not call.aborted.is_set()

    def _waits(self, call: _Call, item: Any) -> bool:
        if isinstance(item, asyncio.Event):
            return not item.is_set()
        held = isinstance(item, tuple) and call.num_sampled + call.request.num_begun >= self.holds.get(call.request.conversation, NEVER)
        return item == HANG or held or self.paused or self.asleep or (self.capabilities.deterministic and self._someone_is_away())

    def _someone_is_away(self) -> bool:
        there = {call.request.conversation for call in self.calls.values()}
        return any(count > self.released[name] and name not in there for name, count in self.opened.items())

    def _finish_of(self, call: _Call, token: int) -> Finish | None:
        if token in call.request.sampling.stop_token_ids:
            return Finish.STOP
        return Finish.LENGTH if call.num_sampled == call.request.sampling.max_tokens else None


class FakeSender:
    """The trainer's end of a transport: a text stands for the weights, and lies where the members read it."""

    simultaneous, timeout_s = False, 600.0

    def __init__(self) -> None:
        self.text, self.sends_once, self.cut = "first", False, False

    def begin(self, version: int, receivers: object) -> SharedTicket:
        return SharedTicket(version)

    def send(self, ticket: object, weights: Iterable[tuple[str, Any]]) -> Sent:
        if self.cut:
            raise OSError("the wire was cut")
        ((_, self.text),) = weights
        return Sent(0)

    def whole(self, version: int) -> SharedTicket:
        if self.sends_once:
            raise SentOnce("it was sent once")
        return SharedTicket(version)

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(eq=False)
class FakeMember(FakeEngine):
    """A `Member` of a pool that plays a script; it can be made to fail, to hang and to die."""

    name: str = "e0"
    sender: FakeSender = field(default_factory=FakeSender)
    weights: Any = "first"
    step_s: float = 0.0
    readable: threading.Event = field(default_factory=threading.Event)
    """Set while its stacks can be read; who reads them waits for it."""
    fails: bool = False
    hangs: bool = False
    dead: bool = False
    updates: list[int] = field(default_factory=list)
    """The versions that it took over."""
    on_take: Callable[[FakeMember], object] = lambda member: None
    """Called when it is given weights, before it takes them."""

    def __post_init__(self) -> None:
        self.readable.set()

    @property
    def receivers(self) -> list[str]:
        return [self.name]

    @property
    def conversations(self) -> set[str]:
        """The open ones."""
        return {name for name, count in self.opened.items() if count}

    def open(self, conversation: str) -> None:
        self.opened[conversation] = 1

    def release(self, conversation: str) -> None:
        self.opened[conversation] = 0

    async def abort(self, request_id: str) -> None:
        await self.here()
        await super().abort(request_id)

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        await self.here()
        return Scored((float(len(self.weights)),) * (len(tokens) - 1))

    async def pause(self) -> None:
        await self.here()
        await super().pause()

    async def resume(self) -> None:
        await self.here()
        await super().resume()

    async def flush(self) -> None:
        await self.here()

    async def sleep(self) -> None:
        await self.here()
        await super().sleep()

    async def health(self) -> EngineHealth:
        await self.here()
        return EngineHealth(1.0, self.step_s)

    async def update(self, ticket: Any, version: int) -> Receipt:
        assert ticket == SharedTicket(version)
        return await self.take(self.sender.text, version)

    async def take(self, weights: str, version: int) -> Receipt:
        """Take over weights."""
        self.on_take(self)
        await self.here()
        assert self.paused or not self.calls, "weights change while it samples"
        self.weights, self.version, self.asleep = weights, version, False
        self.updates.append(version)
        return Receipt(version, {"w": weights}, {"w": weights})

    def stacks(self, *, lost: bool) -> str:
        assert self.readable.wait(60)
        return "" if self.dead else f"{self.name} waits"

    def kill(self) -> None:
        self.dead = True

    def stop(self) -> None:
        self.dead = True

    async def pace(self) -> None:
        await super().pace()
        await self.here()
        if self.fails:
            raise EngineFailed(f"{self.name}: a step failed")

    async def here(self) -> None:
        """Wait while it hangs.

        Raises:
            EngineLost: if it is dead.
        """
        while self.hangs and not self.dead:
            await asyncio.sleep(0.005)
        if self.dead:
            raise EngineLost(f"{self.name} died")
