"""A simulated engine: a member of the real pool that decodes all its requests together, at a given speed."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from whet.engine.base import Capabilities, EngineHealth
from whet.plan.rollouts.config import EngineTimes
from whet.plan.rollouts.world import World
from whet.transport.base import Ticket
from whet.types import Chunk, Finish, Receipt, Request, Scored
from whet.types.columns import Doubles, Floats, Ints

ALMOST = 1e-6
"""Part of a token that rounding may lack."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request at the engine."""

    request: Request
    length: int
    """Tokens still to sample when it came."""
    finish: Finish
    chunks: deque[Chunk] = field(default_factory=deque[Chunk])
    news: asyncio.Event = field(default_factory=asyncio.Event)
    given: int = 0
    """Tokens in chunks so far."""
    began: float | None = None
    """The engine's count when it was admitted. None: it waits."""
    over: bool = False

    def hand_over(self, sampled: int, version: int, finish: Finish | None = None, last: int = 0) -> None:
        """Give out what was sampled since the last chunk."""
        news = sampled - self.given
        if not news and finish is None:
            return
        tokens = Ints.zeros(news) if finish is not Finish.STOP else Ints((*Ints.zeros(news - 1), last))
        self.chunks.append(Chunk(tokens, Floats.zeros(news), version, finish))
        self.given, self.over = sampled, finish is not None
        self.news.set()


class SimulatedMember:
    """A `Member` of a pool. Every running request gets one token in each step, so one count of steps serves all of them.

    Args:
        times: how long it takes.
        world: knows how long replies are.
        max_tokens: longest sequence, in grains.
    """

    receivers: Sequence[str] = ()

    def __init__(self, times: EngineTimes, world: World, max_tokens: int) -> None:
        self.capabilities = Capabilities(max_tokens, shares_weights=False, deterministic=False)
        self._times, self._world = times, world
        self._version, self._paused, self._slowdown = 0, False, 0.0
        self._count = 0.0
        """Steps so far, parts of one included."""
        self._at = self._stall_until = self._busy_s = 0.0
        self._running: dict[str, _Job] = {}
        self._ends: list[tuple[float, int, _Job]] = []
        """Heap of the running requests by the count at which they end."""
        self._waiting: deque[_Job] = deque()
        self._cached: set[str] = set()
        """Conversations and tasks whose context is cached."""
        self._timer: asyncio.TimerHandle | None = None
        self._serial = 0

    # What the pool calls.

    def open(self, conversation: str) -> None:
        pass

    def release(self, conversation: str) -> None:
        self._cached.discard(conversation)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        turn = int(request.id.rpartition("/")[2])
        planned = self._world.plan_of(request.conversation).turns[turn].tokens - request.num_begun
        room = request.sampling.max_tokens
        job = _Job(request, max(1, min(planned, room)), Finish.STOP if planned <= room else Finish.LENGTH)
        self._waiting.append(job)
        self._move(admit=True)
        try:
            while True:
                await job.news.wait()
                job.news.clear()
                while job.chunks:
                    yield job.chunks.popleft()
                if job.over:
                    return
        finally:
            if not job.over:
                self._drop(job)

    async def abort(self, request_id: str) -> None:
        self._move()
        job = self._running.get(request_id) or next((job for job in self._waiting if job.request.id == request_id), None)
        if job is not None:
            job.hand_over(self._sampled(job), self._version, Finish.ABORT)
            self._drop(job)

    async def score(self, tokens: Ints, temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        return Scored(Doubles.zeros(len(tokens) - 1))

    async def pause(self) -> None:
        self._move()
        self._paused = True
        self._move()

    async def resume(self) -> None:
        self._move()
        self._paused = False
        self._move(admit=True)

    async def flush(self) -> None:
        self._cached.clear()

    async def sleep(self) -> None:
        await self.pause()

    async def update(self, ticket: Ticket, version: int) -> Receipt:
        self._move()
        for job in self._running.values():
            job.hand_over(self._sampled(job), self._version)
        self._version = version
        self._cached.clear()
        for job in self._running.values():
            self._compute(job)
        return Receipt(version, {}, None)

    async def health(self) -> EngineHealth:
        self._move()
        return EngineHealth(self._busy_s, 0.0)

    def stacks(self, *, lost: bool) -> str:
        return ""

    def kill(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def slow_down(self, by: float) -> None:
        """Take longer from now on by this share."""
        self._move()
        self._slowdown = by
        self._move()

    @property
    def busy(self) -> bool:
        """True if it has requests to work on."""
        return bool(self._running) and not self._paused

    # Time.

    def _step_s(self) -> float:
        times = self._times
        return (times.step_s + times.step_s_per_request * len(self._running)) * self._world.grain * (1 + self._slowdown)

    def _sampled(self, job: _Job) -> int:
        """Whole tokens of a job so far."""
        return 0 if job.began is None else min(job.length, int(self._count - job.began + ALMOST))

    def _compute(self, job: _Job) -> None:
        """Have the context of a job computed: decoding waits meanwhile."""
        names = job.request.conversation, job.request.conversation.rpartition("/")[0]
        num = len(job.request.tokens) + self._sampled(job)
        if names[0] in self._cached:  # but for what was added since
            num = min(num, 1)
        elif names[1] in self._cached:  # a sibling computed the prompt
            num -= min(num, self._world.plan_of(names[0]).prompt)
        self._cached.update(names)
        seconds = num * self._world.grain / self._times.prefill_tokens_per_s
        self._stall_until = max(self._stall_until, asyncio.get_running_loop().time()) + seconds * (1 + self._slowdown)

    def _move(self, *, admit: bool = False) -> None:
        """Bring the count up to now, end what has ended, and set the next timer."""
        now = asyncio.get_running_loop().time()
        if self._running and not self._paused:
            self._busy_s += now - self._at
            self._count += max(0.0, now - max(self._at, self._stall_until)) / self._step_s()
        self._at = now
        while self._ends and (self._ends[0][2].over or self._ends[0][0] <= self._count + ALMOST):
            job = heapq.heappop(self._ends)[2]
            if not job.over:
                turn = int(job.request.id.rpartition("/")[2])
                last = self._world.last_token(job.request.conversation, turn) if job.finish is Finish.STOP else 0
                job.hand_over(job.length, self._version, job.finish, last)
                del self._running[job.request.id]
                admit = True
        while admit and self._waiting and len(self._running) < self._times.max_running and not self._paused:
            self._admit(self._waiting.popleft())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and not self._paused:
            due = max(now, self._stall_until) + max(0.0, self._ends[0][0] - self._count) * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(due, self._move)

    def _admit(self, job: _Job) -> None:
        self._compute(job)
        job.began = self._count
        self._serial += 1
        self._running[job.request.id] = job
        heapq.heappush(self._ends, (self._count + job.length, self._serial, job))

    def _drop(self, job: _Job) -> None:
        job.over = True
        if job.began is None:
            if job in self._waiting:
                self._waiting.remove(job)
            return
        self._running.pop(job.request.id, None)
        self._move(admit=True)
