"""Greedy trajectories, which others are compared with: played and judged like them, never trained on, and no 0 where they failed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from tests.fakes import HANG, FakeEngine
from tests.rollout.scripted import ANSWER, CALL, RENDERER, STOP, FakeEnv, ListSource, chunk, run, says
from whet.core.batch import batch_of
from whet.engine.base import EngineRefused
from whet.env.base import EnvFactory, Step
from whet.env.limits import Limits
from whet.observe.metrics import flatten
from whet.reward import RewardError
from whet.rollout.control import ControlConfig
from whet.rollout.metrics import RolloutFailed, new_failures, require_valid, rollout_metrics
from whet.rollout.runner import Stalled, TrajectoryRunner, greedily
from whet.rollout.samples import samples_of_groups, score_of
from whet.rollout.scheduler import Rollouts, RolloutSpec
from whet.types import Message, Outcome, Progress, Rewards, SamplingParams, Task

SAMPLING = SamplingParams(50, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(STOP,), stop=("</end>",))


def tasks(*names):
    return [Task(name, (Message("user", name),), name) for name in names]


class ById:
    """Scores a trajectory as it is told, 0.25 unless."""

    def __init__(self, **answers):
        self.answers = answers
        self.seen: list[str] = []

    async def __call__(self, trajectory):
        self.seen.append(trajectory.id)
        answer = self.answers.get(trajectory.id.replace("/", "_"), 0.25)
        if isinstance(answer, BaseException):
            raise answer
        return Rewards(answer)

    def close(self):
        pass


def runner(script, reward=None, **changes):
    engine = FakeEngine(script)
    made = TrajectoryRunner(engine, RENDERER, EnvFactory(FakeEnv), reward or ById(), SAMPLING, Limits(3, 500, 50), None)
    return replace(made, **changes), engine


def by_name(request):
    """Greedy trajectories say something else than sampled ones."""
    return says("greedy" if request.conversation.endswith("/greedy") else "sampled")


def test_every_task_is_played_once_more_at_temperature_0_and_nothing_else_changes():
    who, engine = runner(by_name, ById(a_greedy=0.5, b_greedy=1.0))
    groups = run(who.play(tasks("a", "b"), 2, 5, True))
    plain, other = runner(by_name)
    without = run(plain.play(tasks("a", "b"), 2, 5))
    assert [[t.turns for t in g.trajectories] for g in groups] == [[t.turns for t in g.trajectories] for g in without]
    assert all(group.baseline is None and group.played == group.trajectories for group in without)
    asked = {r.conversation: r for r in engine.requests}
    assert {name: r for name, r in asked.items() if not name.endswith("greedy")} == {r.conversation: r for r in other.requests}
    for i, (group, score) in enumerate(zip(groups, (0.5, 1.0), strict=True)):
        name = f"{group.task.id}/greedy"
        assert group.baseline is not None and group.played == (*group.trajectories, group.baseline)
        assert (group.baseline.id, group.baseline.task, group.baseline.temperature) == (name, group.task, 0.0)
        assert group.baseline.response == "greedy" and group.baseline.rewards == Rewards(score)
        assert asked[name].rank == (i, 2), "after its siblings, whose prompt it shares"
        assert asked[name].sampling == replace(greedily(SAMPLING), max_tokens=50)
    whole = SamplingParams(50, temperature=0.0, stop_token_ids=(STOP,), stop=("</end>",))
    assert greedily(replace(SAMPLING, nucleus=True)) == whole
    engine.check_idle()


def test_a_greedy_trajectory_has_turns_with_the_environment_like_any_other():
    envs: list[FakeEnv] = []

    def make_env():
        envs.append(FakeEnv(steps=(ANSWER, Step(done=True))))
        return envs[-1]

    who, _ = runner(lambda request: says(CALL if request.id.endswith("/0") else "36"), make_env=EnvFactory(make_env))
    (group,) = run(who.play(tasks("a"), 1, 0, True))
    (sampled,), greedy = group.trajectories, group.baseline
    assert greedy is not None and len(greedy.turns) == 2 and len(envs) == 2 and all(env.num_closed == 1 for env in envs)
    assert [t.tokens for t in greedy.turns] == [t.tokens for t in sampled.turns]
    assert greedy.turns[1].context == sampled.turns[1].context and greedy.turns[1].context


def test_no_more_are_under_way_than_may_be():
    under_way: list[int] = []

    def script(request):
        under_way.append(len(engine.running))
        return says("x")

    who, engine = runner(script, max_in_flight=2)
    run(who.play(tasks("a", "b", "c"), 2, 0, True))
    assert max(under_way) == 2 and len(engine.requests) == 9


def test_samples_know_what_the_greedy_trajectory_scored_and_hold_none_of_its_tokens():
    who, _ = runner(by_name, ById(a_greedy=0.5, b_greedy=-1.0))
    groups = run(who.play(tasks("a", "b"), 2, 0, True))
    samples = samples_of_groups(groups)
    assert [(s.trajectory, s.baseline, s.valid) for s in samples] == [
        ("a/0", 0.5, True), ("a/1", 0.5, True), ("b/0", -1.0, True), ("b/1", -1.0, True)
    ]  # fmt: skip
    batch = batch_of(samples)
    assert batch.baseline is not None and batch.baseline.tolist() == [0.5, 0.5, -1.0, -1.0]
    greedy = set(RENDERER.encode("greedy")) - set(RENDERER.encode("sampled"))
    assert greedy and not greedy & set(batch.tokens[batch.loss_mask].tolist())


def test_its_score_has_its_token_rewards_in_it():
    who, _ = runner(by_name)
    (group,) = run(who.play(tasks("a"), 1, 0, True))
    assert group.baseline is not None
    turn = group.baseline.turns[0]
    rewarded = replace(group.baseline, turns=(replace(turn, token_rewards=(0.5,) * len(turn.tokens)),))
    assert score_of(rewarded) == 0.25 + 0.5 * len(turn.tokens)
    assert samples_of_groups([replace(group, baseline=rewarded)])[0].baseline == score_of(rewarded)


@pytest.mark.parametrize(
    ("outcome", "place", "changes"),
    [
        (Outcome.REWARD_ERROR, "reward", {"reward": ById(a_greedy=RewardError("no"))}),
        (Outcome.TIMEOUT, "engine", {"timeout_s": 0.1, "reply": [chunk("half"), HANG]}),
        (Outcome.REFUSED, "engine", {"reply": [EngineRefused("never fits")]}),
        (Outcome.ABORTED, "engine", {"reply": [chunk("half"), OSError("gone")]}),
    ],
)
def test_a_greedy_trajectory_that_failed_is_no_0_its_task_is_not_trained_on(outcome, place, changes):
    reply = changes.pop("reply", says("greedy"))
    who, _ = runner(lambda request: reply if request.conversation == "a/greedy" else says("x"), **changes)
    groups = run(who.play(tasks("a", "b"), 2, 0, True))
    failed = groups[0].baseline
    assert failed is not None and failed.outcome is outcome and score_of(failed) is None
    require_valid(groups, "rollout 0")
    assert failed.error is not None and failed.error.where == place
    assert new_failures(groups, set()) == [("a/greedy", failed.error)]
    samples = samples_of_groups(groups)
    assert [(s.trajectory, s.baseline, s.valid, s.reward) for s in samples] == [
        ("a/0", None, False, 0.25), ("a/1", None, False, 0.25), ("b/0", 0.25, True, 0.25), ("b/1", 0.25, True, 0.25)
    ]  # fmt: skip
    batch = batch_of(samples)
    assert batch.valid.tolist() == [False, False, True, True]
    assert set(batch.sample_of_token[batch.loss_mask].tolist()) == {2, 3}


def test_what_greedy_trajectories_scored_and_cost_is_counted_apart():
    script = lambda request: says("a b c d" if request.conversation == "a/greedy" else "x")  # noqa: E731
    who, _ = runner(script, ById(a_greedy=1.0, b_greedy=RewardError("no"), b_1=RewardError("no")))
    groups = run(who.play(tasks("a", "b"), 2, 0, True))
    values = flatten(rollout_metrics(groups))
    found = {name.removeprefix("baseline/"): value for name, value in values.items() if name.startswith("baseline/")}
    lengths = [len(RENDERER.encode(text)) + 1 for text in ("a b c d", "x")]
    means = {"tokens/mean": sum(lengths) / 2, "tokens/min": min(lengths), "tokens/max": max(lengths)}
    assert found == {"reward": 1.0, "failed": 0.5, "excluded": 1.0, **means}
    assert values["reward/total"] == 0.25 and values["response/tokens/max"] == lengths[1] and values["outcome/failed"] == 0.25
    without = [replace(group, baseline=None) for group in groups]
    assert not [name for name in flatten(rollout_metrics(without)) if name.startswith("baseline/")]


def test_a_rollout_whose_greedy_trajectories_all_failed_has_failed():
    who, _ = runner(by_name, ById(a_greedy=RewardError("no"), b_greedy=RewardError("no")))
    groups = run(who.play(tasks("a", "b"), 2, 0, True))
    text = "rollout 3: all 2 greedy trajectories, which the others are compared with, failed\n2 in reward: RewardError: no"
    with pytest.raises(RolloutFailed) as failed:
        require_valid(groups, "rollout 3")
    assert str(failed.value) == text


def test_in_deterministic_mode_a_slow_one_stops_the_rollout():
    who, _ = runner(by_name, ById(a_greedy=TimeoutError("slow")), deterministic=True)
    with pytest.raises(Stalled, match="trajectory a/greedy was too slow in reward: slow"):
        run(who.play(tasks("a"), 1, 0, True))


def test_what_was_played_before_a_stop_is_not_played_again_the_greedy_one_included():
    """It goes through a checkpoint's JSON; what failed is played again, of a group that had ended, too."""
    hangs = ["a/1", "b/greedy"]

    def script(request):
        return [chunk("half"), HANG] if request.conversation in hangs else by_name(request)

    reward = ById(a_greedy=0.75, c_greedy=RewardError("no"))
    who, _ = runner(script, reward)

    def rollouts(who, source):
        return Rollouts(source, who, ControlConfig(), RolloutSpec(3, 2, baseline=True), 1, 0)

    async def stopped():
        source = ListSource(tasks("a", "b", "c"))
        before = rollouts(who, source)
        taking = asyncio.ensure_future(before.take(Progress()))
        while len(reward.seen) < 9 - len(hangs):
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await before.put_back()
        return source.state(), json.loads(json.dumps(before.state()))

    cursor, state = run(stopped())
    ended = {each["id"] for play in state["group_runs"] for each in play["ended"]}
    assert ended == {"a/0", "a/greedy", "b/0", "b/1", "c/0", "c/1"}, "c's greedy one failed"
    hangs.clear()
    again, engine = runner(script, reward)

    async def gone_on():
        source = ListSource(tasks("a", "b", "c"))
        source.restore(cursor)
        after = rollouts(again, source)
        after.restore(state)
        taken = await after.take(Progress())
        assert source.num_taken == 3, "no further task was needed"
        return taken.groups

    groups = run(gone_on())
    assert sorted(request.conversation for request in engine.requests) == ["a/1", "b/greedy", "c/greedy"]
    undisturbed, _ = runner(script, reward)
    whole = run(undisturbed.play(tasks("a", "b", "c"), 2, 0, True))

    def told(groups):
        return [[(t.id, t.turns, t.outcome, t.rewards, t.temperature) for t in group.played] for group in groups]

    assert told(groups) == told(whole)
    assert samples_of_groups(groups) == samples_of_groups(whole)
