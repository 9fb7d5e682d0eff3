"""A reward of siblings together: on workers or in the event loop, in training and evaluation; where it fails, all of them have failed."""

from __future__ import annotations

import asyncio
import json
import textwrap
from dataclasses import replace

import pytest

from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, FakeEnv, ListSource, run, says
from whet.engine.base import EngineRefused
from whet.env.base import EnvFactory
from whet.env.limits import Limits
from whet.reward import LabelError, RewardConfig, RewardError, RewardTimeout, build_group_reward, build_reward
from whet.rollout.control import ControlConfig, FilterConfig
from whet.rollout.filters import build_selection
from whet.rollout.metrics import RolloutFailed
from whet.rollout.runner import Stalled, TrajectoryRunner
from whet.rollout.samples import samples_of_groups
from whet.rollout.scheduler import Rollouts, RolloutSpec
from whet.types import Message, Outcome, Progress, Rewards, SamplingParams, Task

CODE = """
import asyncio
import os
import time


def ranks(trajectories, best=1.0):
    '''The longest reply is the best.'''
    order = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].response))
    scores = [0.0] * len(trajectories)
    for place, i in enumerate(order):
        scores[i] = best * place / max(1, len(order) - 1)
    return scores


async def ranks_async(trajectories):
    await asyncio.sleep(0)
    return ranks(trajectories)


def process(trajectories):
    return [{"process": os.getpid()} for _ in trajectories]


def half_of_what_they_had(trajectories):
    return [t.rewards.total / 2 for t in trajectories]


def tokens(trajectories):
    from whet.types import Rewards
    return [Rewards(0.0, token_rewards=tuple((1.0,) * len(turn.tokens) for turn in t.turns)) for t in trajectories]


def too_few(trajectories):
    return [1.0]


def none(trajectories):
    return None


def nan(trajectories):
    return [0.0] * (len(trajectories) - 1) + [float("nan")]


def raises(trajectories):
    return [t.task.metadata["gone"] for t in trajectories]


async def raises_async(trajectories):
    return raises(trajectories)


def hangs(trajectories):
    time.sleep(600)


async def hangs_async(trajectories):
    await asyncio.sleep(600)


def dies(trajectories):
    os._exit(3)
"""
PARAMS = SamplingParams(50, stop_token_ids=(STOP,))


class Each:
    """Scores single trajectories: 1, or as it is told by id."""

    def __init__(self, **answers):
        self.answers = {name.replace("_", "/"): answer for name, answer in answers.items()}

    async def __call__(self, trajectory):
        answer = self.answers.get(trajectory.id, Rewards(1.0, {"each": 1.0}))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self):
        pass


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("group") / "group_code.py"
    path.write_text(textwrap.dedent(CODE))
    return path


def runner(reward, each=None, script=None, deterministic=False):
    script = script or (lambda request: says("word " * (1 + int(request.conversation[-1]))))
    engine = FakeEngine(script)
    made = TrajectoryRunner(engine, RENDERER, EnvFactory(FakeEnv), each, PARAMS, Limits(3, 500, 50), 60.0, deterministic=deterministic)
    return replace(made, group_reward=reward)


def tasks(*names):
    return [Task(name, (Message("user", name),), name, origin=f"rows.jsonl:{i + 1}") for i, name in enumerate(names)]


def played(code, name, each=None, num=3, timeout_s=60.0, options=None, **changes):
    """One group of siblings, whose replies grow with their number."""
    config = RewardConfig.model_validate({"group": {"name": f"{code}:{name}", "options": options or {}}, "timeout_s": timeout_s})
    reward = build_group_reward(config)
    assert reward is not None
    try:
        (group,) = run(runner(reward, each, **changes).play(tasks("a"), num, 0))
    finally:
        reward.close()
    return group


@pytest.mark.parametrize("name", ["ranks", "ranks_async"])
def test_siblings_are_scored_together(code, name):
    group = played(code, name)
    assert [t.rewards for t in group.trajectories] == [Rewards(r, {name: r}) for r in (0.0, 0.5, 1.0)]
    assert all(t.outcome is Outcome.COMPLETED and t.timings["reward"] > 0 for t in group.trajectories)
    assert [sample.reward for sample in samples_of_groups([group])] == [0.0, 0.5, 1.0]


def test_it_takes_options(code):
    assert [t.rewards.total for t in played(code, "ranks", options={"best": 4.0}).trajectories] == [0.0, 2.0, 4.0]


def test_a_plain_function_runs_in_another_process(code):
    import os

    processes = {t.rewards.components["process"] for t in played(code, "process").trajectories}
    assert len(processes) == 1 and processes != {os.getpid()}


def test_it_sees_what_each_scored_by_itself_and_keeps_the_parts_of_that(code):
    group = played(code, "half_of_what_they_had", Each(a_1=Rewards(3.0, {"each": 3.0})))
    assert [t.rewards.total for t in group.trajectories] == [0.5, 1.5, 0.5]
    assert group.trajectories[1].rewards.components == {"each": 3.0, "half_of_what_they_had": 1.5}


def test_rewards_of_single_tokens_go_to_their_turns(code):
    for t in played(code, "tokens").trajectories:
        assert t.rewards.token_rewards is None and t.token_reward == t.num_tokens_sampled


def test_one_that_failed_is_not_among_them(code):
    def script(request):
        return [EngineRefused("no room")] if request.conversation == "a/1" else says("word " * (1 + int(request.conversation[-1])))

    group = played(code, "ranks", Each(a_2=RewardError("broke")), num=4, script=script)
    assert [t.outcome for t in group.trajectories] == [Outcome.COMPLETED, Outcome.REFUSED, Outcome.REWARD_ERROR, Outcome.COMPLETED]
    assert [t.rewards and t.rewards.total for t in group.trajectories] == [0.0, None, None, 1.0]
    assert group.trajectories[2].error.where == "reward", "its own failure stays"


def test_where_all_failed_nobody_is_asked(code):
    group = played(code, "dies", script=lambda request: [EngineRefused("no room")])
    assert {t.outcome for t in group.trajectories} == {Outcome.REFUSED}


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("too_few", Outcome.REWARD_ERROR, "it returned 1 scores for 3 trajectories; return one for each"),
        ("none", Outcome.REWARD_ERROR, "it returned a NoneType; return a list with one score for each trajectory"),
        ("nan", Outcome.REWARD_ERROR, "of trajectory 2: the reward is nan; it must be finite"),
        ("raises", Outcome.REWARD_ERROR, "KeyError: 'gone'"),
        ("raises_async", Outcome.REWARD_ERROR, "KeyError: 'gone'"),
        ("dies", Outcome.REWARD_ERROR, "its worker died"),
        ("hangs", Outcome.TIMEOUT, "took longer than 0.3 s (reward.timeout_s)"),
        ("hangs_async", Outcome.TIMEOUT, "took longer than 0.3 s (reward.timeout_s)"),
    ],
)
def test_where_it_fails_all_siblings_have_failed(code, name, outcome, words):
    group = played(code, name, Each(), timeout_s=0.3 if "hangs" in name else 60.0)
    for t in group.trajectories:
        assert t.outcome is outcome and t.rewards is None and t.turns
        assert t.error.where == "reward.group" and words in t.error.message
        assert f"reward of the group '{code}:{name}' on task 'a' (rows.jsonl:1)" in t.error.message
    if name == "raises":
        assert "group_code.py" in t.error.traceback and "in raises" in t.error.traceback
    assert not any(sample.valid for sample in samples_of_groups([group]))


class Together:
    """As it is told, by task; what each call was asked about is kept."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    async def __call__(self, trajectories):
        self.asked.append([t.id for t in trajectories])
        answer = self.answers.get(trajectories[0].task.id, [Rewards(float(k)) for k in range(len(trajectories))])
        if isinstance(answer, BaseException):
            raise answer
        return await answer() if callable(answer) else answer

    def close(self):
        pass


def rollouts(who, source, num=1, **control):
    config = ControlConfig(**control)
    return Rollouts(source, who, config, RolloutSpec(num, 2), 3, 0, build_selection(config))


def test_filters_see_what_siblings_scored_together():
    together = Together(a=[Rewards(1.0), Rewards(1.0)])
    taken = run(rollouts(runner(together), ListSource(tasks("a", "b")), filters=[FilterConfig(name="zero_std")]).take(Progress()))
    assert [group.task.id for group in taken.groups] == ["b"] and [t.rewards.total for t in taken.groups[0].trajectories] == [0.0, 1.0]
    assert [(group.task.id, group.dropped) for group in taken.dropped] == [("a", "zero_std_1.0")]
    assert together.asked == [["a/0", "a/1"], ["b/0", "b/1"]]


def test_its_failures_count_as_failures_of_trajectories():
    with pytest.raises(RolloutFailed, match="2 of 2 trajectories failed") as fault:
        who = runner(Together(a=RewardError("no judge")))
        run(rollouts(who, ListSource(tasks("a")), max_error_rate=0.5, error_window=1).take(Progress()))
    assert "2 in reward.group: RewardError: no judge" in str(fault.value)


def test_a_label_that_it_cannot_use_stops_the_run():
    with pytest.raises(LabelError, match="bad label"):
        run(rollouts(runner(Together(a=LabelError("bad label"))), ListSource(tasks("a"))).take(Progress()))
    with pytest.raises(LabelError, match="bad label"):
        run(runner(Together(b=LabelError("bad label"))).play(tasks("a", "b"), 2, 0))


def test_in_deterministic_mode_a_slow_one_stops_the_run():
    who = runner(Together(a=RewardTimeout("slow")), deterministic=True)
    with pytest.raises(Stalled, match=r"a/0 was too slow in reward\.group: slow"):
        run(rollouts(who, ListSource(tasks("a"))).take(Progress()))


def test_a_stop_while_it_is_asked_keeps_what_was_played_and_asks_again():
    async def forever():
        await asyncio.Event().wait()

    async def stopped():
        together = Together(a=forever)
        source = ListSource(tasks("a"))
        before = rollouts(runner(together), source)
        taking = asyncio.ensure_future(before.take(Progress()))
        while not together.asked:
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await before.put_back()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return source.state(), json.loads(json.dumps(before.state()))

    cursor, state = run(stopped())
    (play,) = state["group_runs"]
    assert len(play["ended"]) == 2 and not play["judged"]
    together = Together()
    source = ListSource(tasks("a"))
    source.restore(cursor)
    who = runner(together)
    after = rollouts(who, source)
    after.restore(state)
    (group,) = run(after.take(Progress())).groups
    assert together.asked == [["a/0", "a/1"]] and not who.engine.requests, "nothing was sampled again"
    assert [t.rewards.total for t in group.trajectories] == [0.0, 1.0]


def test_the_table_says_what_is_missing():
    alone = RewardConfig.model_validate({"group": {"name": "my_code:ranks"}})
    assert not alone.scores_each
    with pytest.raises(ValueError, match=r"reward\.group alone scores no trajectory by itself"):
        build_reward(alone)
    with pytest.raises(ValueError, match="no reward is set"):
        RewardConfig()
    with pytest.raises(ValueError, match=r"reward\.group, its own options"):
        RewardConfig.model_validate({"group": {"name": "my_code:ranks"}, "options": {"x": 1}})
    with pytest.raises(ValueError, match=r"reward\.group 'math:sqrt' cannot be called as f\(trajectories, best=\.\.\.\)"):
        build_group_reward(RewardConfig.model_validate({"group": {"name": "math:sqrt", "options": {"best": 1}}}))
