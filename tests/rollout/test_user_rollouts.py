"""control.rollout: a function of the user's in place of the scheduler; what it may return, and that nothing is lost when it does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, FakeEnv, ListSource, run, says
from whet.config import ConfigError, Hook, HookFailed
from whet.env.base import EnvFactory
from whet.env.limits import Limits
from whet.observe.metrics import flatten
from whet.reward import LabelError
from whet.rollout.control import ControlConfig
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.scheduler import Rollouts, RolloutSpec
from whet.rollout.user_rollouts import OwnRollouts
from whet.types import Message, Outcome, Progress, Rewards, SamplingParams, Task

PARAMS = SamplingParams(50, stop_token_ids=(STOP,))
TASKS = [Task(name, (Message("user", name),), name) for name in "abcdefgh"]


class Each:
    """Scores every trajectory 1, or raises what it is told to by task."""

    def __init__(self, **answers):
        self.answers = answers

    async def __call__(self, trajectory):
        answer = self.answers.get(trajectory.task.id, Rewards(1.0))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self):
        pass


def make(function, reward=None, wanted=RolloutSpec(2, 2)):  # noqa: B008
    engine = FakeEngine(lambda request: says("x"))
    runner = TrajectoryRunner(engine, RENDERER, EnvFactory(FakeEnv), reward or Each(), PARAMS, Limits(3, 500, 50), 60.0)
    source = ListSource(list(TASKS))
    hook = Hook("control.rollout", "my_code:rollout", function)
    return OwnRollouts(hook, source, runner, wanted, 7), source, engine


async def plain(ask):
    return await ask.runner.play(ask.source.next(ask.wanted.groups), ask.wanted.samples_per_prompt, ask.seed, ask.wanted.baseline)


async def best_of_more(ask):
    """Plays twice as many tasks as wanted, and keeps the last ones."""
    groups = await ask.runner.play(ask.source.next(2 * ask.wanted.groups), ask.wanted.samples_per_prompt, ask.seed)
    return [replace(g, dropped="worse") if i < ask.wanted.groups else g for i, g in enumerate(groups)]


def test_it_gets_source_player_and_what_is_wanted():
    asked = []

    async def rollout(ask):
        asked.append(ask)
        return await plain(ask)

    rollouts, source, engine = make(rollout, wanted=RolloutSpec(2, 2, baseline=True))
    progress = Progress(rollout_id=3, version=4)
    engine.version = 4
    taken = run(rollouts.take(progress))
    (ask,) = asked
    assert (ask.wanted.groups, ask.wanted.samples_per_prompt, ask.wanted.baseline, ask.seed) == (2, 2, True, 7)
    assert ask.progress == progress and ask.progress is not progress
    assert [[t.id for t in g.played] for g in taken.groups] == [[f"{n}/0", f"{n}/1", f"{n}/greedy"] for n in "ab"]
    assert source.num_taken == 2 and taken.dropped == []
    assert flatten(taken.metrics)["groups/kept"] == 1.0
    engine.check_idle()


def test_groups_with_a_reason_are_recorded_and_not_trained_on():
    rollouts, _, _ = make(best_of_more)
    taken = run(rollouts.take(Progress()))
    assert [g.task.id for g in taken.groups] == ["c", "d"]
    assert [(g.task.id, g.dropped) for g in taken.dropped] == [("a", "worse"), ("b", "worse")]
    metrics = flatten(taken.metrics)
    assert metrics["groups/kept"] == 0.5 and metrics["groups/dropped/worse"] == 2
    assert metrics["rollout/dropped_tokens"] == sum(t.num_tokens_sampled for g in taken.dropped for t in g.trajectories) > 0


def test_a_rollout_that_was_stopped_gets_its_tasks_again():
    waits = []

    async def rollout(ask):
        groups = await plain(ask)
        if not waits:
            waits.append(ask)
            await asyncio.Event().wait()
        return groups

    rollouts, source, engine = make(rollout)

    async def main():
        taking = asyncio.ensure_future(rollouts.take(Progress()))
        while not waits:
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await rollouts.put_back()
        assert source.num_taken == 0
        first = await rollouts.take(Progress())
        rollouts.on_trained()
        await rollouts.put_back()
        assert source.num_taken == 2, "what was learned from is not put back"
        second = await rollouts.take(Progress(1, 1, 0))
        await rollouts.put_back()
        assert source.num_taken == 2, "what was taken and not learned from is"
        return [[g.task.id for g in taken.groups] for taken in (first, second)]

    assert run(main()) == [["a", "b"], ["c", "d"]]
    assert not engine.running and engine.opened == engine.released


class Hoards:
    """Takes one task more than it returns each time, and plays it first the next time."""

    def __init__(self):
        self.kept: list[str] = []
        self.closed = 0

    async def __call__(self, ask):
        tasks = [*map(ask.source.find, self.kept), *ask.source.next(ask.wanted.groups + 1 - len(self.kept))]
        self.kept = [tasks.pop().id]
        return await ask.runner.play(tasks, ask.wanted.samples_per_prompt, ask.seed)

    def state(self):
        return {"kept": self.kept}

    def restore(self, state):
        self.kept = state["kept"]

    async def close(self):
        self.closed += 1


def test_an_object_s_own_state_is_saved_and_put_back_with_the_source():
    hoards = Hoards()
    rollouts, source, _ = make(hoards)

    async def main():
        first = await rollouts.take(Progress())
        rollouts.on_trained()
        state, cursor = rollouts.state(), source.state()
        second = await rollouts.take(Progress())
        await rollouts.put_back()
        assert (rollouts.state(), source.state()) == (state, cursor), "as before the rollout that was not learned from"
        again, other_source, _ = make(Hoards())
        other_source.restore(cursor)
        again.restore(state)
        third = await again.take(Progress())
        await rollouts.close()
        return [[g.task.id for g in taken.groups] for taken in (first, second, third)]

    assert run(main()) == [["a", "b"], ["c", "d"], ["c", "d"]]
    assert hoards.closed == 1


def test_a_checkpoint_of_another_scheduler_is_refused():
    for function, state in ((plain, {"group_runs": []}), (plain, "{}"), (Hoards(), None), (Hoards(), {"group_runs": []})):
        with pytest.raises(ValueError, match=r"control\.rollout = 'my_code:rollout': what the checkpoint holds is not its state"):
            make(function)[0].restore(state)
    rollouts, source, _ = make(plain)
    scheduler = Rollouts(source, rollouts._runner, ControlConfig(), RolloutSpec(2, 2), 1, 0)
    with pytest.raises(ValueError, match=r"the checkpoint was made with a control\.rollout"):
        scheduler.restore(rollouts.state())


def returns(change):
    async def rollout(ask):
        return change(await plain(ask))

    return rollout


def first(**changes):
    """The first trajectory of the first group, changed."""

    def change(groups):
        bad = replace(groups[0].trajectories[0], **changes)
        return [replace(groups[0], trajectories=(bad, *groups[0].trajectories[1:])), *groups[1:]]

    return returns(change)


def with_greedy(group):
    return replace(group, baseline=replace(group.trajectories[0], id=f"{group.task.id}/greedy"))


def aged(version):
    def change(groups):
        t = groups[0].trajectories[0]
        turn = replace(t.turns[0], versions=(version,) * len(t.turns[0].tokens))
        return [replace(groups[0], trajectories=(replace(t, turns=(turn,)), groups[0].trajectories[1])), groups[1]]

    return returns(change)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (returns(lambda groups: None), "returned NoneType; return a list of groups"),
        (returns(lambda groups: [t for g in groups for t in g.trajectories]), "return a list of groups"),
        (returns(lambda groups: groups[:1]), r"returned 1 groups to train on, but 2 are wanted (batch.prompts_per_rollout)"),
        (returns(lambda groups: [groups[0], replace(groups[1], dropped="no")]), "returned 1 groups to train on"),
        (returns(lambda groups: [groups[0], groups[0]]), "returned two tasks with the id 'a'"),
        (returns(lambda groups: [replace(g, trajectories=g.trajectories[:1]) for g in groups]), "1 trajectories of task 'a'; 2 are"),
        (returns(lambda groups: [with_greedy(g) for g in groups]), "a greedy trajectory, which the algorithm does not ask for"),
        (first(id="a/1"), "returned two trajectories with the id 'a/1'"),
        (first(task=TASKS[5]), "which is of task 'f', not of its group's 'a'"),
        (first(rewards=None), "which ended as completed and has no rewards"),
        (aged(1), "with tokens of versions [1]; the engine has sampled 0 to 0"),
        (aged(-1), "with tokens of versions [-1]"),
    ],
)
def test_what_was_not_asked_for_is_refused(rollout, words):
    rollouts, source, _ = make(rollout)
    with pytest.raises(HookFailed) as fault:
        run(rollouts.take(Progress()))
    assert str(fault.value).startswith("control.rollout = 'my_code:rollout' returned ") and words in str(fault.value)
    run(rollouts.put_back())
    assert source.num_taken == 0


def test_a_failed_trajectory_needs_no_rewards():
    rollouts, _, _ = make(first(outcome=Outcome.ENV_ERROR, rewards=None))
    assert not run(rollouts.take(Progress())).groups[0].trajectories[0].outcome.valid


def test_what_it_raises_is_told_with_its_place_and_whet_s_own_as_it_is(tmp_path):
    (tmp_path / "own.py").write_text("async def rollout(ask):\n    return ask.sauce\n")
    hook = Hook.of("control.rollout", f"{tmp_path}/own.py:rollout", ["ask"], awaited=True)
    rollouts, source, _ = make(plain)
    broken = OwnRollouts(hook, source, rollouts._runner, RolloutSpec(2, 2), 0)
    with pytest.raises(HookFailed, match=r"control\.rollout = .* raised AttributeError: .*'sauce' \(at .*own\.py:2 in rollout\)"):
        run(broken.take(Progress()))
    labels, _, _ = make(plain, Each(a=LabelError("rows.jsonl:1 has no label")))
    with pytest.raises(LabelError, match="has no label"):
        run(labels.take(Progress()))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def rollout(ask): ...", "is a plain function; write it with `async def`"),
        ("async def rollout(source, runner): ...", "cannot be called as f(ask)"),
        ("class rollout:\n    def __init__(self):\n        self.x = 1 / 0\n    async def __call__(self, ask): ...", "ZeroDivisionError"),
        ("class rollout:\n    def __init__(self, size): ...\n    async def __call__(self, ask): ...", "cannot be called as f()"),
        ("class rollout: ...", "not a function or class"),
    ],
)
def test_what_cannot_be_a_rollout_is_refused_by_key(tmp_path, code, words):
    (tmp_path / "own.py").write_text(code + "\n")
    with pytest.raises(ConfigError, match=r"control\.rollout") as fault:
        Hook.of("control.rollout", f"{tmp_path}/own.py:rollout", ["ask"], awaited=True)
    assert words in str(fault.value)


def test_settings_of_the_scheduler_are_refused_beside_it():
    assert ControlConfig(rollout="my_code:rollout", max_staleness=2, too_old="drop").overlaps
    for name, value in {"over_sample": 2.0, "partial": True, "retries": 1, "filters": [{"name": "zero_std"}], "order": "a:b"}.items():
        with pytest.raises(ValueError, match=f"{name}=.* has no effect with rollout='my_code:rollout'"):
            ControlConfig.model_validate({"rollout": "my_code:rollout", name: value})
