"""What the scheduler's tests roll with: an endless source, an engine that stands where it is told to, and a ledger of every task."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from scripted import RENDERER, STOP, ids

from whet.engine.base import Capabilities
from whet.env.base import SingleTurn
from whet.env.limits import Limits
from whet.rollout.control import ControlConfig
from whet.rollout.player import Player
from whet.rollout.scheduler import RolloutResult, Rollouts, RolloutSpec
from whet.types import Chunk, Finish, Group, Message, Progress, Rewards, SamplingParams, Task

NEVER = 10**9


@dataclass
class Endless:
    """Tasks q0, q1 and so on."""

    given: list[str] = field(default_factory=list)
    epoch: int = 0

    def __len__(self) -> int:
        return NEVER

    def next(self, n: int) -> list[Task]:
        new = [f"q{len(self.given) + i}" for i in range(n)]
        self.given += new
        return [self.find(name) for name in new]

    def find(self, task_id: str) -> Task:
        return Task(task_id, (Message("user", f"say {task_id}"),), task_id)

    def state(self) -> Any:
        return len(self.given)

    def restore(self, state: Any) -> None:
        self.given = [f"q{i}" for i in range(state)]


@dataclass
class WordEngine:
    """Says the same to everybody, a token at a time, and stands still where it is told to: while paused, and in `holds`."""

    text: str = "The answer is 36."
    version: int = 0
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(10_000, False, False))
    holds: dict[str, int] = field(default_factory=dict)
    """Conversations that get no more than so many tokens of a turn."""
    begun: list[str] = field(default_factory=list)
    """The conversation of each request."""
    sampled: list[str] = field(default_factory=list)
    """The conversation of each token."""
    running: set[str] = field(default_factory=set)
    opened: Counter[str] = field(default_factory=Counter)
    paused: bool = False
    _aborted: set[str] = field(default_factory=set)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*ids(self.text), STOP)

    def open(self, conversation: str) -> None:
        self.opened[conversation] += 1

    def release(self, conversation: str) -> None:
        self.opened[conversation] -= 1

    async def busy_s(self) -> float:
        return 0.0

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self._aborted.add(request_id)

    async def generate(self, request: Any) -> Any:
        self.begun.append(request.conversation)
        self.running.add(request.id)
        try:
            for place in range(request.num_begun, len(self.tokens)):
                await asyncio.sleep(0)
                while (self.paused or place >= self.holds.get(request.conversation, NEVER)) and request.id not in self._aborted:
                    await asyncio.sleep(0)
                if request.id in self._aborted:
                    yield Chunk((), (), self.version, Finish.ABORT)
                    return
                self.sampled.append(request.conversation)
                last = place == len(self.tokens) - 1
                yield Chunk((self.tokens[place],), (-0.01 * (place + 1),), self.version, Finish.STOP if last else None)
        finally:
            self.running.discard(request.id)
            self._aborted.discard(request.id)

    def check_idle(self) -> None:
        assert not self.running and not +self.opened and not self._aborted


async def one(trajectory: Any) -> Rewards:
    return Rewards(1.0)


@dataclass
class Scored:
    """A function as a reward."""

    function: Callable[[Any], Awaitable[Any]]

    async def __call__(self, trajectory: Any) -> Any:
        return await self.function(trajectory)

    def close(self) -> None:
        pass


@dataclass
class World:
    """Rollouts, and a ledger: every task that the source gave is in exactly one place."""

    control: ControlConfig = field(default_factory=ControlConfig)
    groups: int = 2
    samples: int = 2
    num_rollouts: int = 100
    baseline: bool = False
    reward: Callable[[Any], Awaitable[Any]] = one
    group_reward: Callable[[Any], Awaitable[Any]] | None = None
    keep: Callable[[Group], str | None] = lambda group: None
    order: Any = None
    make_env: Any = SingleTurn
    timeout_s: float | None = None
    deterministic: bool = False
    engine: Any = field(default_factory=WordEngine)
    source: Endless = field(default_factory=Endless)
    limits: Limits = field(default_factory=lambda: Limits(3, 500, 50))
    max_in_flight: int | None = None
    chunk_tokens: int = 1
    renderer: Any = RENDERER
    params: SamplingParams = field(default_factory=lambda: SamplingParams(50, stop_token_ids=(STOP,)))
    progress: Progress = field(default_factory=Progress)
    learned: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollouts = self.new()

    @property
    def player(self) -> Player:
        made = Player(self.engine, self.renderer, self.make_env, Scored(self.reward), self.params, self.limits, self.timeout_s)
        if self.group_reward is not None:
            made = replace(made, group_reward=Scored(self.group_reward))
        return replace(made, max_in_flight=self.max_in_flight, deterministic=self.deterministic, chunk_tokens=self.chunk_tokens)

    def new(self) -> Rollouts:
        wanted = RolloutSpec(self.groups, self.samples, self.baseline)
        return Rollouts(self.source, self.player, self.control, wanted, self.num_rollouts, 7, [self._judge], self.order)

    def snapshot(self) -> Any:
        """What a checkpoint of this moment holds, as JSON, and the ledger's own part."""
        ledger = copy.deepcopy((self.progress, self.learned, self.dropped))
        return json.dumps([self.rollouts.state(), self.source.state()]), ledger

    def restart(self, snapshot: Any) -> None:
        """Go on from there in new rollouts over a new source. Whatever the old ones had under way has ended."""
        (state, source), ledger = json.loads(snapshot[0]), copy.deepcopy(snapshot[1])
        self.source = Endless()
        self.source.restore(source)
        self.progress, self.learned, self.dropped = ledger
        self.rollouts = self.new()
        self.rollouts.restore(state)
        self.check()

    def _judge(self, group: Group) -> str | None:
        self.check()
        reason = self.keep(group)
        if reason is not None and self.control.refill:
            self.dropped.append(group.task.id)
        return reason

    def places(self) -> dict[str, list[str]]:
        """Where tasks are, by the scheduler's own lists."""
        buffer = self.rollouts._buffer
        lists = {name: getattr(buffer, name) for name in ("waiting", "playing", "ready", "taken")}
        lists["spare"] = [spare.group_run for spare in buffer.spare]
        return {name: [play.task.id for play in plays] for name, plays in lists.items()}

    def check(self) -> None:
        """Every task that the source gave is in exactly one place."""
        found = Counter(name for names in self.places().values() for name in names)
        found.update(self.learned)
        found.update(self.dropped)
        assert found == Counter(self.source.given), (self.places(), self.learned, self.dropped)

    async def take(self) -> RolloutResult:
        taken = None
        try:
            taken = await self.rollouts.take(self.progress)
            return taken
        finally:
            if taken is not None and not self.control.refill:
                self.dropped += [group.task.id for group in taken.dropped if group.dropped not in ("left_over", "too_old", "retried")]
            self.check()

    def learn(self, taken: RolloutResult) -> None:
        """An update; a scripted engine has the new version then, a real one was given it before."""
        self.learned += [group.task.id for group in taken.groups]
        self.progress.rollout_id += 1
        self.progress.version += 1
        if isinstance(self.engine, WordEngine):
            self.engine.version = self.progress.version
        self.rollouts.learned()
        self.check()

    async def roll(self) -> RolloutResult:
        taken = await self.take()
        self.learn(taken)
        return taken


def names(groups: Any) -> list[str]:
    return [group.task.id for group in groups]


def versions(group: Group) -> list[tuple[int, ...]]:
    return [turn.versions for t in group.played for turn in t.turns]


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.001)


async def settled() -> None:
    """Whoever can go on does."""
    await asyncio.sleep(0.05)
