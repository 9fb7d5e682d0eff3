"""Tasks, replies, tools and rewards of a simulation. A token is `grain` tokens in one; the last one of a turn is its number in a table."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.observe.records import ROLLOUTS, read_table
from whet.plan.rollouts.config import ReplyTimes, SimulationConfig
from whet.types import JSON, Message, Rewards, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A turn that will be played."""

    tokens: int
    """Sampled. In grains, as everything here"""
    tool_s: float
    """Seconds of the tools that it calls."""
    answer: int
    """Tokens of their answer. 0: the turn is the last one."""


@dataclass(frozen=True, slots=True)
class TrajectoryPlan:
    """A trajectory that will be played."""

    prompt: int
    turns: tuple[TurnPlan, ...]
    reward: float


class World:
    """Everything outside of engines and trainer, drawn from a seed: a trajectory is the same in every simulation of one seed.

    Args:
        config: lengths and times.
    """

    def __init__(self, config: SimulationConfig) -> None:
        self._config, self.grain = config, config.grain
        self._plans: dict[str, TrajectoryPlan] = {}
        self._ends: list[tuple[str, int]] = [("", 0)]
        """Trajectory and turn of each last token; 0 is any other token."""
        self._recorded = read_recorded(Path(config.replies.records), config.grain) if config.replies.records is not None else []

    def plan_of(self, trajectory: str) -> TrajectoryPlan:
        """The trajectory of an id (`task/sample`)."""
        found = self._plans.get(trajectory)
        if found is None:
            found = self._plans[trajectory] = self._drawn(trajectory)
        return found

    def forget(self, trajectories: Sequence[Trajectory]) -> None:
        """Forget trajectories that are trained."""
        for trajectory in trajectories:
            self._plans.pop(trajectory.id, None)

    def last_token(self, trajectory: str, turn: int) -> int:
        """The token that ends a turn."""
        self._ends.append((trajectory, turn))
        return len(self._ends) - 1

    def turn_of(self, token: int) -> TurnPlan:
        """The turn that a token ends."""
        trajectory, turn = self._ends[token]
        return self.plan_of(trajectory).turns[turn]

    def _grains(self, tokens: float) -> int:
        return max(1, round(tokens / self.grain))

    def _drawn(self, trajectory: str) -> TrajectoryPlan:
        task = trajectory.rpartition("/")[0]
        own, shared = random.Random(f"{self._config.seed}/{trajectory}"), random.Random(f"{self._config.seed}/{task}")
        if self._recorded:
            return own.choice(self._recorded[shared.randrange(len(self._recorded))])
        replies = self._config.replies
        turns: list[TurnPlan] = []
        while True:
            tokens = self._grains(min(replies.max_tokens, own.lognormvariate(math.log(replies.median_tokens), replies.sigma)))
            if own.random() >= 1 - 1 / replies.turns:
                turns.append(TurnPlan(tokens, 0.0, 0))
                break
            tool_s = own.expovariate(1 / replies.tool_s) if replies.tool_s else 0.0
            turns.append(TurnPlan(tokens, tool_s, self._grains(replies.tool_tokens)))
        return TrajectoryPlan(self._grains(replies.prompt_tokens), tuple(turns), float(own.random() < share(replies, shared)))


def share(replies: ReplyTimes, of_task: random.Random) -> float:
    """The share of a task's trajectories that succeed: Beta-distributed around `success`, as wide as U-shaped."""
    if replies.success in (0.0, 1.0):
        return replies.success
    return of_task.betavariate(replies.success, 1 - replies.success)


def read_recorded(run: Path, grain: int) -> list[list[TrajectoryPlan]]:
    """Recorded trajectories that have a reward, by task.

    Raises:
        ValueError: if the run has none.
    """
    table = read_table(run / ROLLOUTS, ["rollout_id", "task_id", "trajectory", "order", "reward", "turns", "timings"])
    tasks: dict[tuple[int, str], list[TrajectoryPlan]] = {}
    for row in table.to_pylist():
        if row["reward"] is not None and row["turns"] and row["order"] in (0, None):
            tasks.setdefault((row["rollout_id"], row["task_id"]), []).append(_recorded(row, grain))
    if not tasks:
        raise ValueError(f"replies.records: no trajectory in {run / ROLLOUTS} has a reward")
    return list(tasks.values())


def _recorded(row: Mapping[str, Any], grain: int) -> TrajectoryPlan:
    def grains(tokens: int) -> int:
        return max(1, round(tokens / grain))

    turns, later = row["turns"], row["turns"][1:]
    tool_s = float(dict(row["timings"] or ()).get("env", 0.0)) / max(1, len(later))
    waits = [(tool_s, grains(turn["num_context"])) for turn in later]
    plans = [TurnPlan(grains(turn["num_tokens"]), *wait) for turn, wait in zip(turns, [*waits, (0.0, 0)], strict=True)]
    return TrajectoryPlan(grains(turns[0]["num_context"]), tuple(plans), row["reward"])


class SimulatedSource:
    """Tasks without a content."""

    def __init__(self) -> None:
        self._next = 0

    @property
    def epoch(self) -> int:
        return 0

    def __len__(self) -> int:
        return 1 << 30

    def next(self, n: int) -> list[Task]:
        self._next += n
        return [self.find(f"t{i}") for i in range(self._next - n, self._next)]

    def find(self, task_id: str) -> Task:
        return Task(task_id, "")

    def state(self) -> dict[str, JSON]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, JSON]) -> None:
        self._next = state["next"]


class SimulatedRenderer:
    """Contexts of the right length."""

    num_spelled = 0
    strips = False

    def __init__(self, world: World) -> None:
        self._world = world

    def prompt(self, task: Task, tools: Sequence[Mapping[str, JSON]]) -> tuple[int, ...]:
        return (0,) * self._world.plan_of(f"{task.id}/0").prompt

    def plain(self, text: str, tokens: Sequence[int]) -> tuple[int, ...]:
        return (0,) * int(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return ""

    def parse(self, tokens: Sequence[int], tools: object = (), prompt: object = ()) -> Parsed:
        return Parsed(Message("assistant", str(tokens[-1]) if tokens else "0"))


class Driver:
    """The controller's one thread: turns wait for each other.

    Args:
        seconds: of a turn.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._slowdown = seconds, 0.0
        self._thread = asyncio.Lock()

    def slow_down(self, by: float) -> None:
        """Take longer for turns from now on by this share."""
        self._slowdown = by

    @property
    def busy(self) -> bool:
        """True if a turn is under way."""
        return self._thread.locked()

    async def work(self) -> None:
        """Do a turn's work, after that of all turns before it."""
        async with self._thread:
            await asyncio.sleep(self._seconds * (1 + self._slowdown))


class SimulatedEnv:
    """Tools that take their time."""

    tools = ()

    def __init__(self, world: World, driver: Driver) -> None:
        self._world, self._driver = world, driver

    async def start(self, task: Task) -> Task:
        return task

    async def resume(self, task: Task, turns: Sequence[Turn]) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        turn = self._world.turn_of(int(reply.message.content))
        await self._driver.work()
        if not turn.answer:
            return Step(done=True)
        await asyncio.sleep(turn.tool_s)
        return Step(text=str(turn.answer))

    async def close(self) -> None:
        pass


class SimulatedReward:
    """The reward of the plan, in time."""

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds = world, seconds

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        await asyncio.sleep(self._seconds)
        return Rewards(self._world.plan_of(trajectory.id).reward)

    def close(self) -> None:
        pass
