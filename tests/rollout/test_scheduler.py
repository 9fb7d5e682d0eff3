"""Which groups are played when, which of them are trained on, and that a task is at every moment in exactly one place."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter

import pytest

from tests.rollout.rolling import WORDS, World, names, until, versions
from tests.rollout.scripted import run
from whet.engine.base import EngineRefused
from whet.observe.metrics import flatten
from whet.reward import RewardError
from whet.rollout.control import ControlConfig, FilterConfig
from whet.rollout.metrics import RolloutFailed
from whet.types import Outcome, Rewards

SYNC = ControlConfig()
PARTIAL = ControlConfig(partial=True, max_staleness=2, overlap=False)
OVERLAP = ControlConfig(max_staleness=1)


def of(*kinds):
    return [f"q{k}" for k in kinds]


def is_odd(group):
    return "odd" if int(group.task.id[1:]) % 2 else None


def test_what_filters_drop_is_replaced_and_told():
    world = World(keep=is_odd, groups=2)

    async def main():
        first, second = await world.roll(), await world.roll()
        assert (names(first.groups), names(first.dropped)) == (of(0, 2), of(1))
        assert all(group.dropped == "odd" and len(group.trajectories) == 2 for group in first.dropped)
        assert names(second.groups) == of(4, 6) and names(second.dropped) == of(3, 5)
        values = flatten(second.metrics)
        assert values["groups/kept"] == 0.5 and values["groups/dropped/odd"] == 2
        assert values["rollout/dropped_tokens"] == 4 * len(WORDS)
        world.engine.check_idle(reopened=True)

    run(main())


def test_filters_that_drop_everything_stop_the_run_and_say_what_they_dropped():
    async def fails(trajectory):
        if trajectory.task.id == "q1":
            raise RewardError("the judge is out")
        return Rewards(0.0)

    control = ControlConfig(give_up_after=3)
    world = World(control, keep=lambda group: "no_valid" if group.task.id == "q1" else "zero_std_0.0", reward=fails)

    async def main():
        with pytest.raises(RolloutFailed) as stopped:
            await world.take()
        text = str(stopped.value)
        assert "the filters dropped 6 groups one after another (5 for zero_std_0.0, 1 for no_valid)" in text
        assert "2 in reward: RewardError: the judge is out" in text and "control.give_up_after" in text
        await world.rollouts.put_back()
        world.check()
        assert len(world.dropped) == 6

    run(main())


def test_one_kept_group_begins_the_count_anew():
    control = ControlConfig(give_up_after=2, max_groups=1)
    world = World(control, groups=1, keep=lambda group: None if group.task.id in of(1, 3) else "bad")

    async def main():
        assert names((await world.roll()).groups) == of(1)
        assert names((await world.roll()).groups) == of(3)
        with pytest.raises(RolloutFailed, match="dropped 2 groups one after another"):
            await world.roll()

    run(main())


def test_too_many_errors_stop_the_run_and_say_what_failed():
    async def some(trajectory):
        if trajectory.id.endswith("/0"):
            raise RewardError("the judge is out")
        return Rewards(1.0)

    def rate(most):
        world = World(ControlConfig(max_error_rate=most, error_window=1), groups=3, reward=some)

        async def main():
            try:
                return await world.roll()
            finally:
                await world.rollouts.put_back()
                world.check()

        return run(main())

    assert len(rate(0.5).groups) == 3, "half of them is no more than half"
    with pytest.raises(RolloutFailed) as stopped:
        rate(0.49)
    text = str(stopped.value)
    assert text.startswith("3 of 6 trajectories failed, which is more than control.max_error_rate = 0.49 of them\n")
    assert "3 in reward: RewardError: the judge is out" in text


def test_a_reward_that_fails_half_of_the_time_stops_the_run_by_default_and_a_few_failures_do_not():
    """Over many rollouts of a few trajectories: the share is that of the last 64 of them, and the first traceback is told."""

    def rollouts_until_it_stops(fails):
        played = 0

        async def some(trajectory):
            nonlocal played
            played += 1
            if fails(played):
                raise RewardError("the judge is out")
            return Rewards(played % 2)

        world = World(ControlConfig(), groups=3, num_rollouts=40, reward=some)

        async def main():
            for i in range(40):
                try:
                    await world.roll()
                except RolloutFailed as stopped:
                    return i, str(stopped)
            return 40, ""

        return run(main())

    told, text = rollouts_until_it_stops(lambda n: n % 2 == 0)
    assert told == 64 // 6, "as soon as there are so many"
    assert text.startswith("32 of 64 trajectories failed, which is more than control.max_error_rate = 0.3 of them\n")
    assert "start the same command again" in text and "Traceback (most recent call last)" in text
    assert rollouts_until_it_stops(lambda n: n % 4 == 0)[0] == 40
    assert rollouts_until_it_stops(lambda n: n <= 12)[0] == 40, "two whole rollouts that fail at once are few"
    assert 12 < rollouts_until_it_stops(lambda n: n > 100 and n % 2 == 0)[0] < 40, "what went well before is forgotten"


def tries_of(control, outcomes, groups=1, samples=1):
    """How often each trajectory was scored, the groups, and the metrics; `outcomes` says how each scoring ends."""
    tries: Counter[str] = Counter()

    async def score(trajectory):
        tries[trajectory.id] += 1
        ends = outcomes.get(trajectory.id, [])
        end = ends[tries[trajectory.id] - 1] if tries[trajectory.id] <= len(ends) else 1.0
        if isinstance(end, Exception):
            raise end
        return Rewards(end)

    world = World(control, reward=score, groups=groups, samples=samples)
    return tries, run(world.roll())


def test_what_failed_is_played_again_with_the_same_seed():
    failing = {"q0/0": [RewardError("a"), TimeoutError("b")], "q0/1": [RewardError("c")] * 9}
    tries, taken = tries_of(ControlConfig(retries=2), failing, samples=2)
    assert tries == {"q0/0": 3, "q0/1": 3}
    good, bad = taken.groups[0].trajectories
    assert (good.outcome, good.rewards, bad.outcome) == (Outcome.COMPLETED, Rewards(1.0), Outcome.REWARD_ERROR)
    told = [(group.dropped, t.id, t.outcome) for group in taken.dropped for t in group.trajectories]
    assert sorted(told) == [
        ("retried", "q0/0", Outcome.REWARD_ERROR), ("retried", "q0/0", Outcome.TIMEOUT), *[("retried", "q0/1", Outcome.REWARD_ERROR)] * 2
    ]  # fmt: skip
    assert flatten(taken.metrics)["rollout/retries"] == 4
    assert all(t.turns[0].tokens == good.turns[0].tokens for group in taken.dropped for t in group.trajectories)


def test_retries_have_a_budget_between_two_updates():
    failing = {f"q{n}/0": [RewardError("x")] * 9 for n in range(4)}
    tries, taken = tries_of(ControlConfig(retries=3, retry_budget=5), failing, groups=4)
    assert sum(tries.values()) == 4 + 5 and flatten(taken.metrics)["rollout/retries"] == 5

    async def always(trajectory):
        tries[trajectory.id] += 1
        raise RewardError("x")

    tries.clear()
    world = World(ControlConfig(retries=1, retry_budget=1), reward=always, groups=2, samples=1)

    async def main():
        await world.roll()
        assert sum(tries.values()) == 3
        await world.roll()
        assert sum(tries.values()) == 6, "the budget is whole again after an update"

    run(main())


@pytest.mark.parametrize("refill", [True, False])
def test_in_deterministic_mode_nothing_depends_on_which_group_ends_first(refill):
    def told(waits):
        async def late(trajectory):
            for _ in range(waits(int(trajectory.task.id[1:]))):
                await asyncio.sleep(0)
            return Rewards(1.0)

        control = ControlConfig.model_validate({"filters": [{"name": "zero_std"}], "refill": refill, "over_sample": 2.0})
        world = World(control, deterministic=True, groups=3, samples=1, reward=late, keep=is_odd)
        taken = run(world.roll())
        return names(taken.groups), [(group.task.id, group.dropped) for group in taken.dropped]

    kept, dropped = told(lambda n: 20 * n)
    assert len(kept) == 3 and len(dropped) >= 3
    assert told(lambda n: 400 - 20 * n) == (kept, dropped)


def test_what_is_refused_is_not_played_again():
    world = World(ControlConfig(retries=5), groups=1, samples=1)
    calls = []

    def refuse(request):
        calls.append(request.id)
        raise EngineRefused("never fits")

    world.engine.generate = refuse
    taken = run(world.take())
    assert calls == ["q0/0/0"] and taken.groups[0].trajectories[0].outcome is Outcome.REFUSED


def test_those_left_over_come_first_next_time():
    world = World(ControlConfig(over_sample=2.0), groups=2, samples=1)
    world.engine.holds = {"q0/0": 2, "q3/0": 3}

    async def main():
        first = await world.roll()
        assert names(first.groups) == of(1, 2)
        assert sorted(names(first.dropped)) == of(0, 3) and {group.dropped for group in first.dropped} == {"left_over"}
        assert world.places() == {"waiting": of(0, 3), "playing": [], "ready": [], "taken": [], "spare": []}
        world.engine.check_idle(reopened=True)
        world.engine.holds.clear()
        world.engine.requests.clear()
        second = await world.roll()
        assert world.engine.begun[:4] == ["q0/0", "q3/0", "q4/0", "q5/0"]
        assert names(second.groups) == of(0, 3)
        assert {v for group in second.groups for turn in versions(group) for v in turn} == {1}, "they began anew"

    run(main())


@pytest.mark.parametrize("control", [ControlConfig(max_groups=2), ControlConfig(max_groups=2, max_staleness=3)], ids=["sync", "overlap"])
def test_no_more_groups_are_played_at_a_time_than_max_groups(control):
    most = []

    async def score(trajectory):
        most.append(len(world.places()["playing"]))
        return Rewards(1.0)

    world = World(control, groups=5, samples=2, reward=score, num_rollouts=2)

    async def main():
        await world.roll()
        await world.roll()
        await world.rollouts.close()

    run(main())
    assert max(most) == 2


def test_the_ordering_function_says_which_come_first():
    def newest_first(groups):
        return sorted(groups, key=lambda group: -int(group.task.id[1:]))

    world = World(ControlConfig(max_staleness=1), groups=2, samples=1, order=newest_first)

    async def main():
        taken = await world.take()
        await until(lambda: len(world.places()["ready"]) == 2)
        assert names(taken.groups)[0] > names(taken.groups)[1]
        world.learn(taken)
        ready = world.places()["ready"]
        second = await world.roll()
        assert names(second.groups)[0] > names(second.groups)[1] and set(names(second.groups)) & set(ready)
        await world.rollouts.close()

    run(main())


def test_deterministic_rollouts_come_in_waves_and_are_put_back_whole():
    world = World(keep=is_odd, groups=3, samples=1, deterministic=True)
    seen: dict[str, list[str]] = {}

    async def score(trajectory):
        seen[trajectory.task.id] = world.places()["playing"]
        return Rewards(1.0)

    world.reward = score
    world.rollouts = world.new()

    async def main():
        first = await world.take()
        assert names(first.groups) == of(0, 2, 4)
        assert (seen["q0"], seen["q3"], seen["q4"]) == (of(0, 1, 2), of(3), of(4)), "nothing is begun before all of a wave have ended"
        await world.rollouts.put_back()
        world.dropped.clear()
        assert world.source.given == [], "the cursor is where it was before the rollout"
        world.check()
        again = await world.take()
        assert names(again.groups) == names(first.groups) and flatten(again.metrics) == flatten(first.metrics)

    run(main())


NO_REFILL = ControlConfig(refill=False, over_sample=2.0, filters=[FilterConfig(name="zero_std")])
"""The world brings a filter of its own."""


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_groups", [None, 1, 3])
@pytest.mark.parametrize(
    ("passes", "taken", "called_in", "dropped"),
    [
        (of(0, 1, 2, 3, 4, 5), of(0, 1, 2), 0, 0),
        (of(2, 4, 5), of(2, 4, 5), 0, 3),
        (of(4), of(0, 1, 4), 2, 3),
        ([], of(0, 1, 2), 3, 3),
    ],
)
def test_without_refills_dropped_groups_make_a_rollout_full(passes, taken, called_in, dropped, max_groups, deterministic):
    """slime's filters "with fallback": what passes comes first, and what was dropped is called in where too few pass."""
    control = NO_REFILL.model_copy(update={"max_groups": max_groups})
    first = set(of(*range(6)))

    async def score(trajectory):
        await asyncio.sleep(zlib.crc32(trajectory.id.encode()) % 5 * 0.002)  # they end in any order
        return Rewards(1.0)

    world = World(control, groups=3, samples=1, deterministic=deterministic, reward=score)
    world.keep = lambda group: "flat" if group.task.id in first - set(passes) else None

    async def main():
        found = await world.roll()
        passed = [name for name in names(found.groups) if name in passes]
        assert len(found.groups) == 3 and set(names(found.groups)) <= first
        values = flatten(found.metrics)
        assert values.get("groups/called_in", 0) == called_in == 3 - len(passed)
        assert [name for name in names(found.groups) if name not in passes] == [name for name in taken if name not in passes]
        assert values.get("groups/dropped/flat", 0) <= dropped
        if len(passes) <= 3:
            assert names(found.groups) == taken and len(world.source.given) == 6
        if len(passes) < 3:  # else the rollout may be full before the last group has ended
            assert values.get("groups/dropped/flat", 0) == dropped
        await world.roll()
        await world.rollouts.close()
        world.engine.check_idle(reopened=True)

    run(main())


def test_what_was_set_aside_is_not_lost_when_a_rollout_is_cut_off():
    world = World(NO_REFILL, groups=2, samples=1, keep=is_odd)
    world.engine.holds = {"q0/0": 2, "q2/0": 2}

    async def main():
        taking = asyncio.ensure_future(world.take())
        await until(lambda: len(world.places()["spare"]) == 2)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert {play["task"] for play in world.rollouts.state()["group_runs"]} == set(of(0, 1, 2, 3))
        await world.rollouts.put_back()
        world.check()
        world.engine.holds.clear()
        assert names((await world.roll()).groups) == of(0, 2)
        assert Counter(world.engine.begun)["q1/0"] == 1, "what had ended is judged again, not played again"

    run(main())


@pytest.mark.parametrize("settings", [{"over_sample": 2.0}, {"filters": [{"name": "zero_std"}]}, {"max_staleness": 1}])
def test_to_refuse_refills_has_no_meaning_by_itself(settings):
    with pytest.raises(ValueError, match=r"control\.refill=false has no meaning"):
        ControlConfig(refill=False, **settings)
