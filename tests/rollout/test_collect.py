"""Playing tasks: groups in order, rewards or the reason why there is none, and a stop where the data are wrong."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import pytest
from pydantic import ValidationError

from tests.fakes import HANG, FakeEngine
from tests.rollout.scripted import (
    ANSWER,
    CALL,
    RENDERER,
    STOP,
    FakeEnv,
    chunk,
    forever,
    run,
    says,
)
from whet.engine.base import EngineRefused
from whet.env.base import EnvFactory, Step
from whet.env.limits import Limits
from whet.reward import LabelError, RewardError, RewardTimeout
from whet.rollout.runner import TrajectoryRunner, seed_of
from whet.rollout.samples import samples_of_groups
from whet.rollout.sampling import RolloutConfig, RolloutOverrides, check_trainable
from whet.types import Finish, Grammar, Message, Outcome, Rewards, SamplingParams, Task

PARAMS = SamplingParams(50, stop_token_ids=(STOP,))


class FakeReward:
    """Scores as it is told, by trajectory id; 1 for the others."""

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.seen: list[str] = []

    async def __call__(self, trajectory):
        self.seen.append(trajectory.id)
        answer = self.answers.get(trajectory.id, Rewards(1.0, {"a": 1.0}))
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer

    def close(self):
        pass


def tasks(*names):
    return [Task(name, (Message("user", name),), name) for name in names]


def runner(script, reward=None, make_env=FakeEnv, timeout_s=None, limits=Limits(3, 500, 50)):  # noqa: B008
    engine = FakeEngine(script)
    return TrajectoryRunner(engine, RENDERER, EnvFactory(make_env), reward or FakeReward(), PARAMS, limits, timeout_s), engine


def failure(trajectory):
    assert trajectory.error is not None
    return trajectory.outcome, trajectory.error.where, trajectory.error.kind


def test_groups_come_in_order_with_their_seeds_and_ranks():
    who, engine = runner(lambda request: says(request.id))
    groups = run(who.play(tasks("a", "b"), 3, seed=5))
    assert [group.task.id for group in groups] == ["a", "b"]
    assert [[t.id for t in group.trajectories] for group in groups] == [["a/0", "a/1", "a/2"], ["b/0", "b/1", "b/2"]]
    assert [t.response for group in groups for t in group.trajectories] == [f"{n}/{k}/0" for n in "ab" for k in range(3)]
    assert {r.conversation: r.rank for r in engine.requests} == {f"{n}/{k}": ("ab".index(n), k) for n in "ab" for k in range(3)}
    seeds = {r.conversation: r.sampling.seed for r in engine.requests}
    assert seeds == {f"{n}/{k}": seed_of(5, n, k) for n in "ab" for k in range(3)}
    assert len(set(seeds.values())) == 6
    engine.check_idle()


def test_seeds_are_the_same_everywhere():
    # Pinned: another number here is another run for the same configuration.
    assert seed_of(0, "train/0#0", 0) == 2377138883462483075
    seeds = {seed_of(seed, "t", k) for seed in range(50) for k in range(5)}
    assert len(seeds) == 250 and min(seeds) >= 0 and max(seeds) < 2**63


def test_all_conversations_are_announced_before_the_first_request():
    announced: list[int] = []
    engine_of: list[FakeEngine] = []

    def script(request):
        announced.append(len(engine_of[0].opened))
        return says("a")

    who, engine = runner(script)
    engine_of.append(engine)
    run(who.play(tasks("a", "b"), 4, 0))
    assert announced == [8] * 8


@pytest.mark.parametrize(
    ("answer", "outcome", "kind"),
    [
        (RewardTimeout("slow"), Outcome.TIMEOUT, "RewardTimeout"),
        (TimeoutError("slow"), Outcome.TIMEOUT, "TimeoutError"),
        (RewardError("broke"), Outcome.REWARD_ERROR, "RewardError"),
        (ZeroDivisionError("broke"), Outcome.REWARD_ERROR, "ZeroDivisionError"),
        (Rewards(float("nan")), Outcome.REWARD_ERROR, "ValueError"),
        (None, Outcome.REWARD_ERROR, "ValueError"),
        (Rewards(1.0, token_rewards=((0.5,) * 99,)), Outcome.REWARD_ERROR, "ValueError"),
        (Rewards(1.0, token_rewards=((float("inf"),),)), Outcome.REWARD_ERROR, "ValueError"),
    ],
)
def test_a_failing_reward_is_an_outcome_and_keeps_the_turns(answer, outcome, kind):
    async def give():
        if isinstance(answer, BaseException):
            raise answer
        return answer

    who, engine = runner(lambda request: says("x"), FakeReward({"a/0": give}))
    groups = run(who.play(tasks("a"), 2, 0))
    bad, good = groups[0].trajectories
    assert failure(bad) == (outcome, "reward", kind)
    assert bad.rewards is None and bad.response == "x"
    assert (good.outcome, good.rewards, good.error) == (Outcome.COMPLETED, Rewards(1.0, {"a": 1.0}), None)
    assert set(good.timings) == set(bad.timings) == {"engine", "env", "reward"}
    assert [sample.valid for sample in samples_of_groups(groups)] == [False, True]
    engine.check_idle()


def test_a_bare_number_is_a_reward():
    who, _ = runner(lambda request: says("x"), FakeReward({"a/0": 0.25}))
    assert run(who.play(tasks("a"), 1, 0))[0].trajectories[0].rewards == Rewards(0.25)


def test_rewards_of_single_tokens_go_to_the_turns_that_they_are_of():
    async def give(trajectory):
        return Rewards(1.0, token_rewards=tuple(tuple(0.5 * i for i in range(len(turn.tokens))) for turn in trajectory.turns))

    reward = FakeReward()
    reward.__class__ = type("Giving", (FakeReward,), {"__call__": lambda self, trajectory: give(trajectory)})
    who, _ = runner(lambda request: says("x y"), reward)
    (trajectory,) = run(who.play(tasks("a"), 1, 0))[0].trajectories
    (turn,) = trajectory.turns
    assert len(turn.tokens) > 1 and turn.token_rewards == tuple(0.5 * i for i in range(len(turn.tokens)))
    assert trajectory.rewards == Rewards(1.0), "they are kept once"


def test_time_over_in_the_reward():
    who, engine = runner(lambda request: says("x"), FakeReward({"a/0": forever}), timeout_s=0.05)
    (trajectory,) = run(who.play(tasks("a"), 1, 0))[0].trajectories
    assert failure(trajectory) == (Outcome.TIMEOUT, "reward", "TimeoutError")
    assert trajectory.error is not None and "waited for the reward" in trajectory.error.message
    assert trajectory.response == "x"
    engine.check_idle()


def test_a_label_that_cannot_be_used_stops_the_run_and_lets_go_of_everything():
    envs: list[FakeEnv] = []

    def make_env():
        envs.append(FakeEnv())
        return envs[-1]

    def script(request):
        return says("x") if request.conversation.startswith("bad") else [chunk("half"), HANG]

    who, engine = runner(script, FakeReward({"bad/0": LabelError("task 'bad' (rows.jsonl:7) has no label")}), make_env)

    async def main():
        with pytest.raises(LabelError, match=r"task 'bad' \(rows\.jsonl:7\) has no label"):
            await who.play(tasks("a", "bad", "b"), 1, 0)
        engine.check_idle()
        assert [env.num_closed for env in envs] == [1, 1, 1]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_a_cancelled_rollout_lets_go_of_everything():
    who, engine = runner(lambda request: [chunk("half"), HANG])

    async def main():
        job = asyncio.ensure_future(who.play(tasks("a", "b"), 2, 0))
        while len(engine.chunks) < 4:
            await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        engine.check_idle()

    run(main())


def test_every_outcome_is_in_its_group_and_no_token_is_lost():
    """One task for each way to end; what the engine handed over is what the trajectories hold."""
    scripts = {
        "completed": [says(CALL), says("36")],
        "turns": [says("a")] * 3,
        "tokens": [says("a " * 10), says("b " * 10), says("c " * 10)],
        "turn_tokens": [says("a"), [chunk("b", Finish.LENGTH)]],
        "aborted": [says("a"), [chunk("b"), chunk("c", Finish.ABORT)]],
        "env_error": [says("a"), says("b")],
        "reward_error": [says("a"), says("b")],
        "timeout": [says("a"), [chunk("b"), HANG]],
        "refused": [says("a"), [EngineRefused("never fits")]],
        "broken": [says("a"), [chunk("b"), OSError("gone")]],
    }
    ends = {"completed": Step(done=True), "env_error": KeyError("k"), "reward_error": Step(done=True)}

    class Env(FakeEnv):
        async def start(self, task):
            self.steps = [ANSWER, ends.get(task.id, ANSWER)]
            return task

    def script(request):
        name, _, turn = request.id.split("/")
        return scripts[name][int(turn)]

    long = len(RENDERER.prompt(tasks("tokens")[0])) + 60
    reward = FakeReward({"reward_error/0": RewardError("no")})
    who, engine = runner(script, reward, Env, timeout_s=0.3, limits=Limits(3, long, 40))
    groups = run(who.play(tasks(*scripts), 1, 0))
    engine.check_idle()
    outcomes = {group.task.id: group.trajectories[0].outcome for group in groups}
    assert outcomes == {
        "completed": Outcome.COMPLETED,
        "turns": Outcome.TRUNCATED,
        "tokens": Outcome.TRUNCATED,
        "turn_tokens": Outcome.TRUNCATED,
        "aborted": Outcome.ABORTED,
        "env_error": Outcome.ENV_ERROR,
        "reward_error": Outcome.REWARD_ERROR,
        "timeout": Outcome.TIMEOUT,
        "refused": Outcome.REFUSED,
        "broken": Outcome.ABORTED,
    }
    assert sorted(reward.seen) == sorted(f"{n}/0" for n in ("completed", "turns", "tokens", "turn_tokens", "reward_error"))
    for group in groups:
        (trajectory,) = group.trajectories
        assert (trajectory.rewards is not None) == trajectory.outcome.valid
        assert (trajectory.error is None) == (trajectory.outcome.valid or group.task.id == "aborted")
        handed = [t for name, piece in engine.chunks if name == trajectory.id for t in piece.tokens]
        assert [t for turn in trajectory.turns for t in turn.tokens] == handed
    trained = {sample.trajectory: sum(sample.loss_mask) for sample in samples_of_groups(groups)}
    assert trained == Counter(name for name, piece in engine.chunks for _ in piece.tokens)


def test_what_cannot_be_played_is_refused():
    who, _ = runner(lambda request: says("x"))
    with pytest.raises(ValueError, match="different ids"):
        run(who.play(tasks("a", "a"), 1, 0))
    with pytest.raises(ValueError, match="samples_per_prompt must be at least 1, not 0"):
        run(who.play(tasks("a"), 0, 0))


def test_the_config_becomes_sampling_and_limits():
    config = RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, max_turns=2, max_tokens=99, max_turn_tokens=11, stop_token_ids=[4, 2])
    assert config.sampling((2, 3)) == SamplingParams(11, 0.7, 0.9, 5, stop_token_ids=(2, 3, 4))
    assert config.limits() == Limits(2, 99, 11)
    assert RolloutConfig(timeout_s=None).timeout_s is None


@pytest.mark.parametrize("keys", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"max_turns": 0}, {"timeout_s": 0}, {"top": 1}])
def test_impossible_settings_are_refused(keys):
    with pytest.raises(ValidationError, match=next(iter(keys))):
        RolloutConfig(**keys)


def test_training_refuses_what_it_cannot_replay():
    check_trainable(RolloutConfig(temperature=0.5))
    with pytest.raises(ValueError, match=r"rollout\.temperature=0 cannot be trained on.*set it above 0"):
        check_trainable(RolloutConfig(temperature=0))
    check_trainable(RolloutConfig(top_p=0.9, top_k=40))
    check_trainable(RolloutConfig(stop=["</search>"]))


@pytest.mark.parametrize(
    ("key", "value", "whole"),
    [
        ("min_p", 0.1, "0.0"),
        ("repetition_penalty", 1.1, "1.0"),
        ("presence_penalty", 0.5, "0.0"),
        ("frequency_penalty", -0.5, "0.0"),
        ("min_tokens", 4, "0"),
        ("json_schema", "{}", "none"),
        ("regex", "[0-9]+", "none"),
    ],
)
def test_options_that_bend_the_distribution_are_for_evaluation_alone(key, value, whole):
    shown = re.escape(str(value))
    text = rf"rollout\.{key}={shown} cannot be trained on.*set rollout\.{key}={whole}, and {key}={shown} for evaluation"
    with pytest.raises(ValueError, match=text):
        check_trainable(RolloutConfig(**{key: value}))
    evaluated = RolloutOverrides(**{key: value}).over(RolloutConfig())
    sampling = evaluated.sampling([7])
    assert sampling.grammar == Grammar(key, value) if isinstance(value, str) else getattr(sampling, key) == value


@pytest.mark.parametrize(("form", "words"), [({"regex": "a"}, "json_schema and regex"), ({"min_tokens": 2}, "min_tokens cannot be 2")])
def test_a_turn_has_one_form_and_no_least_length_beside_it(form, words):
    with pytest.raises(ValueError, match=words):
        RolloutConfig(json_schema="{}", **form)


def test_stop_texts_of_an_evaluation_replace_those_of_training():
    training = RolloutConfig(stop=["</search>"])
    assert training.sampling([7]).stop == ("</search>",)
    assert RolloutOverrides().over(training).stop == ["</search>"]
    assert RolloutOverrides(stop=[]).over(training).stop == []
