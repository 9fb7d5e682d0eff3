"""A trajectory that never returns delays no step, before a stop and after it, and has one outcome once its time is over."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.rollout.rolling import World, names
from whet.env.base import SingleTurn
from whet.env.limits import Limits
from whet.rollout.control import ControlConfig
from whet.types import Outcome

STEP_S = 20.0
"""For a rollout of a scripted engine, which takes a few milliseconds."""
MODES = {
    "over_sample": ControlConfig(over_sample=1.5, max_error_rate=1),
    "partial": ControlConfig(max_staleness=1, overlap=False, partial=True, over_sample=1.5, max_error_rate=1),
    "overlap": ControlConfig(max_staleness=1, max_error_rate=1),
}


class Stuck(SingleTurn):
    """The environment never answers the task q1."""

    async def start(self, task):
        self.task = task
        return task

    async def resume(self, task, turns):
        return await self.start(task)

    async def step(self, reply):
        if self.task.id == "q1":
            await asyncio.Event().wait()
        return await super().step(reply)


async def roll(world, ended):
    async with asyncio.timeout(STEP_S):
        taken = await world.take()
    ended += [t for group in (*taken.groups, *taken.dropped) for t in group.trajectories if group.task.id == "q1"]
    world.learn(taken)
    return names(taken.groups)


@pytest.mark.parametrize("mode", list(MODES))
def test_a_trajectory_that_never_returns_delays_no_step_before_a_stop_and_after_it(mode):
    async def main():
        ended = []
        world = World(MODES[mode], groups=2, samples=2, make_env=Stuck, limits=Limits(3, 500, 50))
        for _ in range(4):
            assert "q1" not in await roll(world, ended)
        await world.rollouts.put_back()
        world.engine.paused = False  # a new process has a new engine
        world.restart(world.snapshot())
        for _ in range(4):
            assert "q1" not in await roll(world, ended)
        await world.rollouts.close()
        world.check()
        assert len(world.learned) == 16 and "q1" in world.places()["waiting"]
        assert all(t.outcome is Outcome.ABORTED and t.turns for t in ended) if mode == "over_sample" else not ended
        world.engine.check_idle(reopened=True)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(main()) == []


@pytest.mark.parametrize("mode", list(MODES))
def test_the_last_rollouts_of_a_run_do_without_it(mode):
    async def main():
        world = World(MODES[mode], groups=2, samples=2, make_env=Stuck, num_rollouts=8)
        for _ in range(3):
            await roll(world, [])
        for _ in range(4):
            await world.rollouts.put_back()
            world.engine.paused = False
            world.restart(world.snapshot())
            await roll(world, [])
        await roll(world, [])
        await world.rollouts.close()
        assert len(world.learned) == 16 and "q1" in world.places()["waiting"]

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["partial", "overlap"])
def test_it_has_one_outcome_when_its_time_is_over_after_a_resume(mode):
    async def main():
        ended = []
        world = World(MODES[mode], groups=2, samples=2, make_env=Stuck, timeout_s=1.0)
        await roll(world, ended)
        await world.rollouts.put_back()
        world.engine.paused = False
        world.restart(world.snapshot())
        async with asyncio.timeout(STEP_S):
            while "q1" not in world.learned:
                await roll(world, ended)
                await asyncio.sleep(0.05)
        await roll(world, ended)
        await world.rollouts.close()
        assert Counter((t.id, t.outcome) for t in ended) == {("q1/0", Outcome.TIMEOUT): 1, ("q1/1", Outcome.TIMEOUT): 1}

    asyncio.run(main())
