"""Resources in rollouts: one of a group for its siblings, one of the run for all, closed in whichever way a group ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.fakes import FakeEngine
from tests.rollout.rolling import WORDS, World, names, one, until
from tests.rollout.scripted import FakeEnv, run
from whet.env.base import EnvFactory, SingleTurn, Step
from whet.env.resources import Resource
from whet.rollout.control import ControlConfig
from whet.types import Outcome, Progress

SYNC = ControlConfig()
PARTIAL = ControlConfig(partial=True, max_staleness=2, overlap=False, over_sample=2.0)
OVERLAP = ControlConfig(max_staleness=1)


class Resumes(SingleTurn):
    pass


class Shop:
    """A resource of a group and one of the run, and environments that hold both."""

    def __init__(self, env=FakeEnv, *, fails=()):
        self.seen: list[str] = []
        self.fails = set(fails)
        self.used: dict[str, list[object]] = {}
        self.envs: list[object] = []
        self.engine: FakeEngine | None = None
        self._env = env

        @asynccontextmanager
        async def server():
            self.seen.append("open server")
            yield object()
            self.seen.append("close server")

        @asynccontextmanager
        async def stock(task):
            await asyncio.sleep(0)
            if task.id in self.fails:
                raise OSError("no room")
            self.seen.append(f"open {task.id}")
            if self.engine is not None:
                name = f"{task.id}/0"
                assert self.engine.opened[name] - self.engine.released[name] == 1, "a deterministic engine waits for it"
            yield self.used.setdefault(task.id, [])
            self.seen.append(f"close {task.id}")

        needs = {"server": Resource(server, of_group=False), "stock": Resource(stock, of_group=True)}
        self.factory = EnvFactory(self._make, needs)

    def _make(self, server=None, stock=None):
        env = self._env()
        self.envs.append(server)
        if stock is not None:
            stock.append(env)
        return env

    def check_closed(self):
        opened = [word for word in self.seen if word.startswith("open")]
        assert sorted(word.removeprefix("open ") for word in opened) == sorted(
            word.removeprefix("close ") for word in self.seen if word.startswith("close")
        )

    def count(self, word):
        return self.seen.count(word)


def over(world: World):
    """The run ends."""
    return world.rollouts._runner.resources.aclose()


@pytest.mark.parametrize("control", [SYNC, OVERLAP, PARTIAL], ids=["sync", "overlap", "partial"])
def test_siblings_share_a_group_s_resource_and_all_groups_the_run_s(control):
    shop = Shop()
    world = World(control, groups=2, samples=3, num_rollouts=2, baseline=True, make_env=shop.factory, max_in_flight=2)
    shop.engine = world.engine

    async def main():
        for _ in range(2):
            taken = await world.roll()
            assert all(len(shop.used[name]) >= 4 for name in names(taken.groups)), "three siblings and the greedy one"
            assert all(shop.count(f"close {name}") == 1 for name in names(taken.groups))
        await world.rollouts.close()
        assert shop.count("open server") == 1 and shop.count("close server") == 0
        await over(world)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    shop.check_closed()
    assert shop.seen[-1] == "close server"
    assert len({id(server) for server in shop.envs if server is not None}) == 1


def test_a_resource_that_fails_is_an_error_of_each_trajectory_with_place_and_prompt():
    shop = Shop(fails=["q0"])
    world = World(groups=2, samples=2, make_env=shop.factory)

    async def main():
        taken = await world.roll()
        failed, well = taken.groups
        for trajectory in failed.trajectories:
            assert (trajectory.outcome, trajectory.rewards, trajectory.turns) == (Outcome.ENV_ERROR, None, ())
            error = trajectory.error
            assert error is not None and (error.where, error.kind) == ("env.resources", "ResourceFailed")
            assert "the resource stock of the prompt q0 could not be opened: OSError: no room (at " in error.message
            assert "in stock" in error.traceback
        assert [t.outcome for t in well.trajectories] == [Outcome.COMPLETED] * 2
        await world.rollouts.close()
        await over(world)

    run(main())
    world.engine.check_idle()
    shop.check_closed()


def test_a_retry_opens_what_failed_again():
    shop = Shop(fails=["q0"])
    world = World(ControlConfig(retries=1), groups=1, samples=1, make_env=shop.factory)

    async def main():
        taking = asyncio.create_task(world.roll())
        await until(lambda: world.rollouts._stats.num_retries == 0)
        shop.fails.clear()
        taken = await taking
        assert [t.outcome for t in taken.groups[0].trajectories] == [Outcome.COMPLETED]
        await over(world)

    run(main())
    shop.check_closed()


def test_one_that_takes_too_long_is_a_timeout():
    @asynccontextmanager
    async def never(task):
        await asyncio.Event().wait()
        yield

    factory = EnvFactory(lambda it=None: FakeEnv(), {"it": Resource(never, of_group=True)})
    world = World(groups=1, samples=2, timeout_s=0.05, make_env=factory)

    async def main():
        taken = await world.roll()
        for trajectory in taken.groups[0].trajectories:
            assert trajectory.error is not None and trajectory.outcome is Outcome.TIMEOUT
            assert trajectory.error.where == "env.resources" and "waited for env.resources" in trajectory.error.message
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


@pytest.mark.parametrize("end", ["left over", "filtered", "too old", "put back", "closed", "cancelled", "a fault"])
def test_a_group_s_resource_is_closed_in_whichever_way_the_group_ends(end):
    shop = Shop()
    controls = {
        "left over": ControlConfig(over_sample=2.0),
        "too old": ControlConfig(max_staleness=4, max_partial_age=0),
    }
    world = World(controls.get(end, SYNC), groups=1, samples=2, make_env=shop.factory)
    if end == "filtered":
        world.keep = lambda group: "odd" if group.task.id == "q0" else None
    else:
        world.engine.holds = {"q0/1": 3}

    async def main():
        if end in ("left over", "too old"):
            await world.roll()
            if end == "too old":
                await world.roll()
                world.engine.holds.clear()
                await world.roll()
            assert shop.count("close q0") == 1 and "q0/1" in world.engine.begun
        elif end == "filtered":
            assert names((await world.roll()).groups) == ["q1"]
            assert shop.count("close q0") == 1
        else:
            taking = asyncio.create_task(world.take())
            await until(lambda: world.engine.sampled.count("q0/1") == 3)
            if end == "a fault":
                world.rollouts._fault = KeyError("x")
                world.rollouts._changed.set()
            else:
                taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await (world.rollouts.put_back() if end == "put back" else world.rollouts.close())
            assert shop.count("open q0") == shop.count("close q0") == 1
        await world.rollouts.close()
        shop.seen.append("over")
        await over(world)
        assert shop.seen[shop.seen.index("over") :] == ["over", "close server"], "every group's was closed before"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    world.engine.check_idle()
    shop.check_closed()


@pytest.mark.parametrize("how", ["resumes", "starts again", "tools of a group"])
def test_a_group_that_goes_on_gets_a_fresh_resource(how):
    """What had ended stays as it ended; what had not goes on where its environment can, and starts again otherwise."""
    shop = Shop(Resumes if how != "starts again" else FakeEnv)
    factory = shop.factory if how != "tools of a group" else EnvFactory(shop.factory.make, shop.factory.needs, resumes=False)
    world = World(groups=1, samples=2, make_env=factory)
    world.engine.holds = {"q0/1": 3}

    async def main():
        taking = asyncio.create_task(world.take())
        await until(lambda: world.engine.sampled.count("q0/1") == 3)
        await until(lambda: "q0/0" in world.rollouts._buffer.playing[0].ended)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await world.rollouts.put_back()
        snapshot = world.snapshot()
        await over(world)
        shop.check_closed()
        world.engine.holds.clear()
        world.engine.sampled.clear()
        world.restart(snapshot)
        taken = await world.roll()
        assert names(taken.groups) == ["q0"]
        assert [t.outcome for t in taken.groups[0].trajectories] == [Outcome.COMPLETED] * 2
        assert "q0/0" not in world.engine.sampled, "it had ended"
        num_more = len(WORDS) - (3 if how == "resumes" else 0)
        assert world.engine.sampled.count("q0/1") == num_more
        await world.rollouts.close()
        await over(world)

    run(main())
    assert shop.count("open q0") == shop.count("close q0") == 2 and shop.count("open server") == 2
    shop.check_closed()


def test_evaluations_open_and_close_them_too_and_a_trajectory_by_itself_is_a_group_of_one():
    shop = Shop()
    world = World(make_env=shop.factory, groups=2, samples=3)
    runner = world.runner

    async def main():
        groups = await runner.play([world.source.find(name) for name in ("a", "b")], 3, 0)
        assert [t.outcome for group in groups for t in group.trajectories] == [Outcome.COMPLETED] * 6
        assert shop.seen == ["open server", "open a", "open b", "close a", "close b"] and len(shop.used["a"]) == 3
        (spec, _) = runner.specs(world.source.find("c"), 0, 2, 0, False)
        await runner.finish(runner.begin(spec))
        assert shop.seen[-2:] == ["open c", "close c"]
        await runner.resources.aclose()
        shop.check_closed()

    run(main())


def test_a_cancelled_evaluation_closes_them():
    shop = Shop()
    world = World(make_env=shop.factory)
    world.engine.holds = {"a/1": 2}
    runner = world.runner

    async def main():
        playing = asyncio.create_task(runner.play([world.source.find("a")], 2, 0))
        await until(lambda: world.engine.sampled.count("a/1") == 2)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert shop.seen == ["open server", "open a", "close a"]
        await runner.resources.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    shop.check_closed()
    world.engine.check_idle()


def test_steps_use_what_siblings_left():
    """A group's resource is one world: what one sibling did, the next one sees."""

    @asynccontextmanager
    async def counter(task):
        yield [0]

    class Counts(SingleTurn):
        def __init__(self, counter=None):
            self.counter = counter

        async def step(self, reply):
            assert self.counter is not None
            self.counter[0] += 1
            return Step(done=True, reward=float(self.counter[0]))

    async def turn(trajectory):
        return trajectory.turns[-1].reward

    factory = EnvFactory(Counts, {"counter": Resource(counter, of_group=True)})
    world = World(groups=2, samples=3, make_env=factory, reward=turn)
    taken = run(world.roll())
    assert [sorted(t.rewards.total for t in group.trajectories) for group in taken.groups] == [[1.0, 2.0, 3.0]] * 2
    assert world.progress == Progress(rollout_id=1, version=1) and one is not turn
