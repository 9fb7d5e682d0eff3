"""Playing tasks: groups of trajectories with their rewards, for training and evaluation alike."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from whet.data.template import Renderer
from whet.engine.base import Engine, EngineLost, StaleCache
from whet.env.base import Env, EnvFactory
from whet.env.deadline import Deadline, Pauses
from whet.env.failure import failure_of
from whet.env.limits import Limits
from whet.env.resources import Resources
from whet.env.rollout import Play, TokenCount, TrajectoryRun
from whet.reward.base import GroupReward, LabelError, Reward, RewardTimeout, place_token_rewards, read_score
from whet.rollout.siblings import judge_siblings
from whet.types import Group, Outcome, RunFailed, SamplingParams, Task, Trajectory


class Stalled(RunFailed):
    """In deterministic mode something took longer than its limit: an outcome that hangs on time would not be the same again."""

    def __init__(self, trajectory: Trajectory) -> None:
        error = trajectory.error
        why = "" if error is None else f" in {error.where}: {error.message}"
        super().__init__(
            f"trajectory {trajectory.id} was too slow{why}; with deterministic=true no outcome may depend on time, so the run stops: "
            "mend what hangs, raise its limit (env.tool_timeout_s, reward.timeout_s, rollout.timeout_s), or set deterministic=false to "
            "count such trajectories as timeouts"
        )


UNBOUNDED = 1 << 30
"""Trajectories at a time, where nothing bounds them."""
GREEDY = "greedy"
"""Part of a greedy trajectory's id in the place of a sampled trajectory's number."""


def greedily(sampling: SamplingParams) -> SamplingParams:
    """The most likely token every time; nothing of it is trained on, so nothing need be replayed."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, nucleus=False, routes=False)


@dataclass(frozen=True, slots=True)
class TrajectorySpec:
    """One trajectory that is to be played."""

    id: str
    task: Task
    sampling: SamplingParams
    rank: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TrajectoryRunner:
    """Everything that playing a task takes."""

    engine: Engine
    renderer: Renderer
    make_env: EnvFactory
    reward: Reward | None
    """Reward of single trajectories; None: trajectories are only scored together."""
    sampling: SamplingParams
    limits: Limits
    timeout_s: float | None
    """Seconds that one trajectory may take, engine and reward included; then it is a timeout. None: any time."""
    max_in_flight: int | None = None
    """Trajectories under way at a time; a later one's time begins when it is started. None: all at once."""
    deterministic: bool = False
    """No outcome may depend on how long anything took: `timeout_s` bounds each wait for the environment and the reward alone, and a limit
    that runs out stops the rollout."""

    chunk_tokens: int = 0
    """As for `TrajectoryRun`."""
    play_by: Play | None = None
    """Plays each trajectory in place of taking turns with its environment."""
    group_reward: GroupReward | None = None
    """Reward of siblings together."""
    sampled: TokenCount = field(default_factory=TokenCount)
    """Tokens of all trajectories that it began."""
    resources: Resources = field(default_factory=Resources)
    """Resources of the run. Groups have their own; a trajectory that is played by itself is a group of one."""

    @property
    def resumable(self) -> bool:
        """True if an interrupted trajectory can continue from its turns, which do not hold the messages between them."""
        return self.play_by is None and self.make_env.resumable and not self.renderer.strips

    async def play(self, tasks: Sequence[Task], samples_per_prompt: int, seed: int, baseline: bool = False) -> list[Group]:
        """Play every task `samples_per_prompt` times; the engine decides how many of those in flight run together.

        Args:
            tasks: with unique ids.
            samples_per_prompt: trajectories of each.
            seed: with the task's id and the sample's index it seeds the sampling.
            baseline: play every task once more, greedily: its group's `baseline`, with the environment, limits and reward of the others.

        Returns:
            One group per task, in the order of the tasks. A trajectory that failed is in it, with its outcome.

        Raises:
            ValueError: two tasks have the same id, or there is nothing to play.
            LabelError: the reward cannot use a task's label. The data are wrong, so nothing is played on.
            Stalled: in deterministic mode, something took longer than its limit.
            EngineLost: in deterministic mode, a process of the engine died or hung.
            StaleCache: the engine was about to read what older weights cached: what was proven of it does not hold.
        """
        if len({task.id for task in tasks}) != len(tasks):
            raise ValueError("the tasks of one rollout must have different ids")
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, not {samples_per_prompt}")
        slots = self.slots()
        ended: dict[str, Trajectory] = {}

        async def one(spec: TrajectorySpec, resources: Resources) -> None:
            async with slots:
                ended[spec.id] = await self.finish(self.begin(spec), resources)

        async def siblings(index: int, task: Task) -> None:
            async with aclosing(self.resources.of_group(task)) as resources:
                await _all([one(spec, resources) for spec in self.specs(task, index, samples_per_prompt, seed, baseline)])

        await _all([siblings(i, task) for i, task in enumerate(tasks)])
        groups = [
            Group(
                task,
                tuple(ended[trajectory_id(task, k)] for k in range(samples_per_prompt)),
                ended[trajectory_id(task, GREEDY)] if baseline else None,
            )
            for task in tasks
        ]
        judged: dict[str, Group] = {}

        async def together(group: Group) -> None:
            judged[group.task.id] = await self.judge(group)

        await _all([together(group) for group in groups])
        return [judged[task.id] for task in tasks]

    def slots(self) -> asyncio.Semaphore:
        """One for each trajectory that may be under way at a time."""
        return asyncio.Semaphore(self.max_in_flight or UNBOUNDED)

    def specs(self, task: Task, index: int, samples_per_prompt: int, seed: int, baseline: bool) -> list[TrajectorySpec]:
        """A task's trajectories, `index` being its place among its rivals. The greedy one comes last: then its prompt is in the engine's
        cache."""
        specs = [
            TrajectorySpec(trajectory_id(task, k), task, replace(self.sampling, seed=seed_of(seed, task.id, k)), (index, k))
            for k in range(samples_per_prompt)
        ]
        greedy = TrajectorySpec(trajectory_id(task, GREEDY), task, greedily(self.sampling), (index, samples_per_prompt))
        return [*specs, greedy] if baseline else specs

    def begin(self, spec: TrajectorySpec, interrupted: Trajectory | None = None, pauses: Pauses | None = None) -> TrajectoryRun:
        """Start a trajectory, whose time begins now. It continues `interrupted`, if that is given; time spent
        in `pauses` does not count."""
        run = TrajectoryRun(
            id=spec.id,
            task=spec.task,
            engine=self.engine,
            renderer=self.renderer,
            sampling=spec.sampling,
            limits=self.limits,
            rank=spec.rank,
            deadline=Deadline.after(self.timeout_s, per_wait=self.deterministic, pauses=pauses),
            chunk_tokens=self.chunk_tokens,
            sampled=self.sampled,
        )
        if interrupted is not None:
            run.resume_from(interrupted)
        return run

    async def finish(self, run: TrajectoryRun, resources: Resources | None = None) -> Trajectory:
        """Play it to its end, and judge it.

        Args:
            run: the trajectory.
            resources: those of its group, which outlast it; None: it has its own.

        Raises:
            LabelError, Stalled, EngineLost, StaleCache: as `play`.
        """
        if resources is None:
            async with aclosing(self.resources.of_group(run.task)) as own:
                return await self.finish(run, own)

        async with aclosing(resources.of_trajectory()) as own:

            async def open_env() -> Env:
                async with run.waits_for("env.resources"):
                    opened = await own.open(self.make_env.needs)
                return self.make_env(**opened)

            trajectory = await run.to_end(open_env, self.play_by)
        if trajectory.outcome.valid and self.reward is not None:
            trajectory = await self._judge(self.reward, trajectory, run.deadline)
        if self.deterministic and trajectory.outcome is Outcome.TIMEOUT:
            raise Stalled(trajectory)
        ends = {StaleCache.__name__: StaleCache, **({EngineLost.__name__: EngineLost} if self.deterministic else {})}
        if trajectory.error is not None and (kind := ends.get(trajectory.error.kind)) is not None:
            raise kind(f"trajectory {trajectory.id}: {trajectory.error.message}")
        return trajectory

    async def judge(self, group: Group) -> Group:
        """A group whose trajectories have all ended, as the reward of siblings together scores it; without one, as it is.

        Raises:
            LabelError, Stalled: as `play`.
        """
        if self.group_reward is None:
            return group
        judged = await judge_siblings(group, self.group_reward)
        late = [t for t in judged.trajectories if t.outcome is Outcome.TIMEOUT]
        if self.deterministic and late:
            raise Stalled(late[0])
        return judged

    async def _judge(self, reward: Reward, trajectory: Trajectory, deadline: Deadline) -> Trajectory:
        """Add the rewards. A reward that fails is an outcome, never a 0."""
        began = time.monotonic()
        try:
            async with deadline.ends("the reward"):
                trajectory, rewards = place_token_rewards(trajectory, read_score(await reward(trajectory)))
        except LabelError:
            raise
        except (RewardTimeout, TimeoutError) as late:
            outcome, rewards, error = Outcome.TIMEOUT, None, failure_of(late, "reward")
        except Exception as fault:  # the rollout boundary
            outcome, rewards, error = Outcome.REWARD_ERROR, None, failure_of(fault, "reward")
        else:
            outcome, error = trajectory.outcome, None
        timings = {**trajectory.timings, "reward": time.monotonic() - began}
        return replace(trajectory, outcome=outcome, rewards=rewards, error=error, timings=timings)


def seed_of(seed: int, task_id: str, k: int) -> int:
    """The seed of one trajectory: 63 bits of a hash, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{task_id}/{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def trajectory_id(task: Task, k: int | str) -> str:
    """Id of a task's k-th trajectory, or of its greedy one."""
    return f"{task.id}/{k}"


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them. When one raises, or this is cancelled, the others are cancelled and have ended before it does."""
    running = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
