"""What is unfinished or finished too early: it waits, goes on, is put back, begins anew; and never is a task lost or there twice."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.rollout.rolling import WORDS, World, names, settled, until, versions
from tests.rollout.scripted import FakeEnv, run
from whet.engine.base import EngineFailed
from whet.env.base import Resumable, SingleTurn, Step
from whet.observe.metrics import flatten
from whet.rollout.control import ControlConfig
from whet.types import Outcome, Rewards
from whet.types.json_codec import trajectory_from_json

SYNC = ControlConfig()
PARTIAL = ControlConfig(partial=True, max_staleness=2, overlap=False)
OVERLAP = ControlConfig(max_staleness=1)


def of(*kinds):
    return [f"q{k}" for k in kinds]


def is_odd(group):
    return "odd" if int(group.task.id[1:]) % 2 else None


def test_partial_trajectories_go_on_with_all_that_was_sampled():
    world = World(PARTIAL, groups=1, samples=2)
    world.engine.holds = {"q0/1": 3}
    world.control = PARTIAL.model_copy(update={"over_sample": 2.0})
    world.rollouts = world.new()

    async def main():
        first = await world.roll()
        assert names(first.groups) == of(1) and first.dropped == []
        assert world.places()["playing"] == of(0)
        world.engine.holds.clear()
        before = len(world.engine.sampled)
        await settled()
        assert len(world.engine.sampled) == before, "nobody samples between two rollouts"
        second = await world.roll()
        assert names(second.groups) == of(0)
        length = len(WORDS)
        assert versions(second.groups[0]) == [(0,) * length, (0,) * 3 + (1,) * (length - 3)]
        assert [t.turns[0].tokens for t in second.groups[0].trajectories] == [WORDS] * 2
        assert world.engine.begun.count("q0/1") == 1, "it was not asked for again"
        await world.rollouts.close()
        world.engine.check_idle(reopened=True)

    run(main())


@pytest.mark.parametrize("control", [PARTIAL, ControlConfig(max_staleness=4)], ids=["partial", "overlap"])
def test_what_was_begun_too_long_ago_begins_anew(control):
    control = control.model_copy(update={"max_partial_age": 1, "over_sample": 2.0 if control.partial else 1.0})
    world = World(control, groups=1, samples=1)
    world.engine.holds = {"q0/0": 2}

    async def main():
        for _ in range(2):
            taken = await world.roll()
            assert "q0" not in names(taken.groups) and taken.dropped == []
        assert "q0" in world.places()["playing"]
        third = await world.roll()
        assert [(group.task.id, group.dropped) for group in third.dropped] == [("q0", "too_old")]
        assert [versions(group) for group in third.dropped] == [[(0, 0)]]
        world.engine.holds.clear()
        found = []
        while "q0" not in names(found):
            found = (await world.roll()).groups
        assert min(v for turn in versions(found[0]) for v in turn) >= 2
        await world.rollouts.close()
        world.engine.check_idle(reopened=True)

    run(main())


def test_the_engine_is_awake_for_an_evaluation_and_stands_still_again():
    control = PARTIAL.model_copy(update={"over_sample": 2.0})
    world = World(control, groups=1, samples=1)
    world.engine.holds = {"q0/0": 2}

    async def main():
        await world.roll()
        world.engine.holds.clear()
        assert world.engine.paused
        with pytest.raises(KeyError):
            async with world.rollouts.engine_awake():
                assert not world.engine.paused
                raise KeyError("an evaluation that fails")
        assert world.engine.paused
        async with world.rollouts.engine_awake():
            await until(lambda: world.engine.sampled.count("q0/0") == len(WORDS))
        assert world.engine.paused
        assert names((await world.roll()).groups) == of(0)
        await world.rollouts.close()

    run(main())
    idle = World(SYNC, groups=1)

    async def asleep():
        async with idle.rollouts.engine_awake():
            assert not idle.engine.paused
        assert not idle.engine.paused, "it did not stand still before, so it does not afterwards"

    run(asleep())


def test_a_trajectory_s_time_does_not_run_while_sampling_is_suspended():
    control = PARTIAL.model_copy(update={"over_sample": 2.0})
    world = World(control, groups=1, samples=1, timeout_s=20)
    world.engine.holds = {"q0/0": 2}

    async def main():
        await world.roll()
        deadline = world.rollouts._buffer.playing[0].runs["q0/0"].deadline
        assert deadline.left_s is not None
        before = deadline.left_s
        await settled()
        assert deadline.left_s == pytest.approx(before, abs=1e-6), "suspended"
        async with world.rollouts.engine_awake():
            await settled()
            awake = deadline.left_s
        assert awake < before - 0.04, "it runs while an evaluation has the engine sample"
        await settled()
        assert deadline.left_s <= awake
        stood = deadline.left_s
        await settled()
        assert deadline.left_s == pytest.approx(stood, abs=1e-6)
        world.engine.holds.clear()
        assert (await world.roll()).groups[0].trajectories[0].outcome is Outcome.COMPLETED
        await world.rollouts.close()

    run(main())


def test_greedy_trajectories_belong_to_their_groups_under_overlap_and_across_a_restart():
    world = World(OVERLAP, groups=2, samples=2, baseline=True, num_rollouts=4)
    world.engine.holds = {"q1/greedy": 3}

    async def main():
        first = await world.roll()
        assert names(first.groups) == of(0, 2)
        state = await _saved(world)
        cut = next(play for play in state["group_runs"] if play["task"] == "q1")
        assert [t["id"] for t in cut["ended"]] == ["q1/0", "q1/1"] and [t["id"] for t in cut["interrupted"]] == ["q1/greedy"]
        _restart(world, state)
        world.engine.holds.clear()
        world.engine.requests.clear()
        second = await world.roll()
        assert names(second.groups)[0] == "q1" and "q1/0" not in world.engine.begun
        assert second.groups[0].baseline is not None and second.groups[0].baseline.turns[0].versions[:4] == (0, 0, 0, 1)
        for group in [*first.groups, *second.groups]:
            assert len(group.trajectories) == 2 and group.baseline is not None
            assert group.baseline.id == f"{group.task.id}/greedy" and group.baseline.temperature == 0
            assert group.baseline.turns[0].tokens == WORDS
        await world.rollouts.close()

    run(main())


async def _saved(world):
    """What a checkpoint would hold, after everything under way was ended."""
    await world.rollouts.put_back()
    world.check()
    return json.loads(json.dumps(world.rollouts.state()))


def _restart(world, state):
    world.rollouts = world.new()
    world.rollouts.restore(state)
    world.check()


def test_under_overlap_no_more_is_begun_than_the_bound_and_than_the_run_takes():
    """Six rollouts of two groups: twelve tasks leave the source and no thirteenth, and never more than six are out unlearned."""
    world = World(ControlConfig(max_staleness=2), groups=2, samples=1, num_rollouts=6)
    out = []
    late = asyncio.Event()

    async def score(trajectory):
        out.append(len(world.source.given) - len(world.learned))
        await asyncio.sleep(0.002)
        if trajectory.task.id == "q11":
            await late.wait()
        return Rewards(1.0)

    world.reward = score
    world.rollouts = world.new()

    async def main():
        for _ in range(6):
            taken = await world.take()
            assert len(world.source.given) <= 12
            await asyncio.sleep(0.02)  # the trainer is at work, and groups end meanwhile
            world.learn(taken)
            if "q8" in names(taken.groups):
                late.set()  # the last one ends between two rollouts
            await asyncio.sleep(0.01)
        assert len(world.source.given) == 12 and world.places() == {"waiting": [], "playing": [], "ready": [], "taken": [], "spare": []}

    run(main())
    assert max(out) == 6


def test_what_is_played_while_the_trainer_works_is_never_too_old_if_it_ends_in_order():
    """With a bound of 1, what is begun before an update trains right after it: its age is 1, and no token is masked."""
    world = World(ControlConfig(max_staleness=1), groups=2, samples=1, num_rollouts=6)

    async def main():
        for _ in range(6):
            taken = await world.take()
            ages = [world.progress.version - v for group in taken.groups for turn in versions(group) for v in turn]
            assert min(ages) >= 0 and max(ages) <= 1
            await settled()
            world.learn(taken)
            await settled()

    run(main())


@pytest.mark.parametrize("control", [SYNC, PARTIAL, OVERLAP], ids=["sync", "partial", "overlap"])
@pytest.mark.parametrize("resumable", [True, False])
def test_what_is_put_back_is_taken_again(control, resumable):
    assert not isinstance(FakeEnv(), Resumable)
    world = World(control, groups=2, samples=2, make_env=SingleTurn if resumable else FakeEnv)
    world.engine.holds = {"q1/1": 4}

    async def main():
        taking = asyncio.ensure_future(world.take())
        if control.overlaps:
            assert names((await taking).groups) == of(0, 2)
        else:
            await until(lambda: world.engine.sampled.count("q1/1") == 4 and len(world.engine.running) == 1)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
        state = await _saved(world)
        world.engine.check_idle(reopened=True)
        assert (next(p for p in state["group_runs"] if p["task"] == "q1")["interrupted"] != []) == resumable
        world.engine.holds.clear()
        again = await world.roll()
        assert names(again.groups) == (of(0, 2) if control.overlaps else of(0, 1))
        found = again.groups + ((await world.roll()).groups if control.overlaps else [])
        assert "q1" in names(found) and {t.outcome for group in found for t in group.trajectories} == {Outcome.COMPLETED}
        begun = world.engine.begun.count("q1/1"), world.engine.sampled.count("q1/1")
        length = len(WORDS)
        assert begun == (2, length if resumable else length + 4)
        assert world.engine.begun.count("q0/0") == 1, "what had ended is not played again"
        await world.rollouts.close()

    run(main())


class Dying:
    """An engine that is gone by the time it is told to abort, or does not answer."""

    def __init__(self, engine, how):
        self._engine, self._how, self.num_asked = engine, how, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def abort(self, request_id):
        self.num_asked += 1
        if self._how == "gone":
            raise EngineFailed("engine copy 0 died (killed by signal 9)")
        await asyncio.Event().wait()


@pytest.mark.parametrize("how", ["gone", "deaf"])
def test_with_an_engine_that_is_gone_what_there_is_is_put_back_all_the_same(how, monkeypatch):
    monkeypatch.setattr("whet.rollout.group_run.ABORT_GRACE_S", 0.2)
    world = World(PARTIAL, groups=2, samples=2)
    world.engine.holds = {"q1/1": 4}
    world.engine = Dying(world.engine, how)
    world.rollouts = world.new()

    async def main():
        taking = asyncio.ensure_future(world.take())
        await until(lambda: world.engine.sampled.count("q1/1") == 4 and len(world.engine.running) == 1)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        state = await _saved(world)
        assert world.engine.num_asked and not world.engine.running
        assert [(p["task"], len(p["ended"]), len(p["interrupted"])) for p in state["group_runs"]] == [("q0", 2, 0), ("q1", 1, 1)]
        begun = trajectory_from_json(state["group_runs"][1]["interrupted"][0])
        assert len(begun.turns[0].tokens) == 4

    run(main())


def test_what_was_dropped_since_the_last_rollout_is_in_the_state():
    world = World(OVERLAP, groups=2, samples=1, keep=is_odd)

    async def main():
        taken = await world.take()
        told = names(taken.dropped)
        await until(lambda: len(world.places()["ready"]) == 2)
        later = [name for name in world.dropped if name not in told]
        assert later, "something was dropped while the trainer was at work"
        world.learn(taken)
        state = await _saved(world)
        _restart(world, state)
        second = await world.roll()
        assert [name for name in names(second.dropped) if name in later] == later
        values = flatten(second.metrics)
        kept, dropped = len(second.groups) + values["rollout/ready_groups"], values["groups/dropped/odd"]
        assert dropped == len(second.dropped) and values["rollout/dropped_tokens"] == dropped * len(WORDS)
        assert values["groups/kept"] == pytest.approx(kept / (kept + dropped))
        await world.rollouts.close()

    run(main())


def test_a_fault_while_the_trainer_works_is_told_to_whoever_takes_next():
    def keep(group):
        if group.task.id == "q2":
            raise KeyError("difficulty")
        return None

    world = World(OVERLAP, groups=2, samples=1, keep=keep)
    world.engine.holds = {"q2/0": 1, "q3/0": 1}

    async def main():
        taken = await world.take()
        world.engine.holds.clear()
        await settled()
        world.learn(taken)
        with pytest.raises(KeyError, match="difficulty"):
            await world.take()
        state = await _saved(world)
        assert "q2" in [play["task"] for play in state["group_runs"]], "it is not lost"
        world.engine.check_idle(reopened=True)

    run(main())


def test_what_the_environment_counted_is_counted_once_when_its_answer_is_asked_for_again():
    """Cut off while its reward is at work: the environment answers the last turn anew when the trajectory goes on."""

    class Counting(SingleTurn):
        async def step(self, reply):
            return Step(done=True, counts={"tool_calls": 1, "tool_calls_malformed": 0})

    asked = asyncio.Event()

    async def score(trajectory):
        if asked.is_set():
            return Rewards(float(trajectory.counts["tool_calls"]))
        asked.set()
        await asyncio.Event().wait()

    world = World(SYNC, groups=1, samples=1, reward=score, make_env=Counting)

    async def main():
        taking = asyncio.ensure_future(world.take())
        await asked.wait()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        state = await _saved(world)
        assert state["group_runs"][0]["interrupted"][0]["turns"][0]["finish"] == "stop"
        _restart(world, state)
        (group,) = (await world.take()).groups
        (trajectory,) = group.trajectories
        assert trajectory.counts == {"tool_calls": 1, "tool_calls_malformed": 0} and trajectory.rewards == Rewards(1.0)
        assert world.engine.begun == ["q0/0"], "nothing was sampled again"

    run(main())


def test_siblings_that_are_scored_while_everything_ends_begin_nothing_new():
    """Closing takes a while, since the engine is slow to abort one group; another one's reward of all siblings comes in meanwhile."""
    scored = asyncio.Event()

    async def together(siblings):
        if siblings[0].task.id == "q3":
            await scored.wait()
        return [Rewards(1.0) for _ in siblings]

    async def slowly(request_id):
        scored.set()
        await settled()
        await abort(request_id)

    world = World(OVERLAP, groups=2, samples=1, group_reward=together)
    abort, world.engine.abort = world.engine.abort, slowly
    world.engine.holds = {"q2/0": 2}

    async def main():
        taken = await world.take()
        await until(lambda: world.engine.sampled.count("q3/0") == len(WORDS))
        await settled()
        assert world.places()["playing"] == of(2, 3)
        given = list(world.source.given)
        await world.rollouts.close()
        world.check()
        assert world.places()["playing"] == [] and world.source.given == given
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("rollout")]
        assert names(taken.groups) == of(0, 1)

    run(main())
