"""Playing tasks: groups of trajectories with their rewards, for training and evaluation alike."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from whet.data.template import Renderer
from whet.engine.base import Engine
from whet.env.base import Env
from whet.env.rollout import Limits, failure_of, run_trajectory
from whet.reward import Reward
from whet.types import Group, Outcome, SamplingParams, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that playing a task takes."""

    engine: Engine
    renderer: Renderer
    make_env: Callable[[], Env]
    reward: Reward
    sampling: SamplingParams
    limits: Limits
    timeout_s: float
    """Seconds that one trajectory may take, engine time included; then it is a timeout."""

    async def play(self, tasks: Sequence[Task], samples_per_prompt: int, seed: int) -> list[Group]:
        """Play every task `samples_per_prompt` times, all at once; the engine decides how many run together.

        Args:
            tasks: with unique ids.
            samples_per_prompt: trajectories of each.
            seed: with the task's id and the sample's index it seeds the sampling.

        Returns:
            One group per task, in the order of the tasks.
        """
        if len({task.id for task in tasks}) != len(tasks):
            raise ValueError("the tasks of one rollout must have different ids")
        jobs = [
            self._one(task, i, k, seed) for i, task in enumerate(tasks) for k in range(samples_per_prompt)
        ]
        done = await asyncio.gather(*jobs)
        return [
            Group(task, tuple(done[i * samples_per_prompt : (i + 1) * samples_per_prompt]))
            for i, task in enumerate(tasks)
        ]

    async def _one(self, task: Task, index: int, k: int, seed: int) -> Trajectory:
        name = f"{task.id}/{k}"
        sampling = replace(self.sampling, seed=seed_of(seed, task.id, k))
        try:
            async with asyncio.timeout(self.timeout_s):
                trajectory = await run_trajectory(
                    name, task, self.make_env(), self.engine, self.renderer, sampling, self.limits, (index, k)
                )
        except TimeoutError as late:
            self.engine.release(name)
            text = TimeoutError(f"trajectory {name} took longer than {self.timeout_s:g} s (rollout.timeout_s)")
            return Trajectory(name, task, (), Outcome.TIMEOUT, None, failure_of(text.with_traceback(late.__traceback__), "rollout"))
        return await self._judge(trajectory)

    async def _judge(self, trajectory: Trajectory) -> Trajectory:
        """Add the rewards. A reward that fails is an outcome, never a 0."""
        if not trajectory.outcome.valid:
            return trajectory
        began = time.monotonic()
        try:
            rewards = await self.reward(trajectory)
        except TimeoutError as late:
            return replace(trajectory, outcome=Outcome.TIMEOUT, error=failure_of(late, "reward"))
        except Exception as fault:  # the rollout boundary
            return replace(trajectory, outcome=Outcome.REWARD_ERROR, error=failure_of(fault, "reward"))
        timings = {**trajectory.timings, "reward": time.monotonic() - began}
        return replace(trajectory, rewards=rewards, timings=timings)


def seed_of(seed: int, task_id: str, k: int) -> int:
    """The seed of one trajectory: 63 bits of a hash, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{task_id}/{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
