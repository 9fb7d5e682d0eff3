"""What the scheduler's tests roll with: an endless source, an engine that stands where it is told to, and a ledger of every task."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fakes import FakeEngine, repeats
from tests.rollout.scripted import RENDERER, STOP, ids
from whet.env.base import EnvFactory, SingleTurn
from whet.env.limits import Limits
from whet.observe.metrics import flatten, merge_metrics
from whet.rollout.control import ControlConfig
from whet.rollout.filters import Selection
from whet.rollout.recipe import Recipe
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.scheduler import RolloutResult, Rollouts, RolloutSpec
from whet.rollout.token_account import unaccounted
from whet.types import Group, Message, Progress, Rewards, SamplingParams, Task

WORDS = (*ids("The answer is 36."), STOP)
"""The reply of `word_engine`."""


def word_engine() -> FakeEngine:
    """An engine that says the same to everybody, and stands still while it is paused, and in `holds`."""
    return FakeEngine(repeats(WORDS))


@dataclass
class Endless:
    """Tasks q0, q1 and so on."""

    given: list[str] = field(default_factory=list)
    epoch: int = 0

    def __len__(self) -> int:
        return 10**9

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
    """A function, or a factory."""
    timeout_s: float | None = None
    deterministic: bool = False
    engine: Any = field(default_factory=word_engine)
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
    def runner(self) -> TrajectoryRunner:
        make = self.make_env if isinstance(self.make_env, EnvFactory) else EnvFactory(self.make_env)
        made = TrajectoryRunner(self.engine, self.renderer, make, Scored(self.reward), self.params, self.limits, self.timeout_s)
        if self.group_reward is not None:
            made = replace(made, group_reward=Scored(self.group_reward))
        return replace(made, max_in_flight=self.max_in_flight, deterministic=self.deterministic, chunk_tokens=self.chunk_tokens)

    def new(self) -> Rollouts:
        wanted = RolloutSpec(self.groups, self.samples, self.baseline)
        return Rollouts(self.source, self.runner, self.control, wanted, self.num_rollouts, 7, Selection([self._judge], self.order))

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
        lists["spare"] = [each.group_run for each in buffer.fallbacks]
        return {name: [play.task.id for play in plays] for name, plays in lists.items()}

    def check(self) -> None:
        """Every task that the source gave is in exactly one place."""
        found = Counter(name for names in self.places().values() for name in names)
        found.update(self.learned)
        found.update(self.dropped)
        assert found == Counter(self.source.given), (self.places(), self.learned, self.dropped)

    def check_tokens(self, taken: RolloutResult) -> None:
        """Every token that the engine handed over was trained, dropped or kept for later."""
        _, used = Recipe(max_staleness=self.control.max_staleness).samples(taken.groups, self.progress.version)
        found = merge_metrics(taken.metrics, used)
        assert unaccounted(found) == 0, flatten(found)

    async def take(self) -> RolloutResult:
        taken = None
        try:
            taken = await self.rollouts.take(self.progress)
            self.check_tokens(taken)
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
        if isinstance(self.engine, FakeEngine):
            self.engine.version = self.progress.version
        self.rollouts.on_trained()
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
