"""Trajectories that a function of a user's plays: its time, its end by an abort, and what it returns."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import HANG, FakeEngine
from tests.rollout.scripted import RENDERER, STOP, TASK, FakeEnv, chunk, ids, opens, run, says, turns
from whet.env.deadline import Deadline, Pauses
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.types import Finish, Origin, Outcome, SamplingParams

PARAMS = SamplingParams(999, stop_token_ids=(STOP,), seed=7)
LIMITS = Limits(max_turns=4, max_tokens=1000, max_turn_tokens=200)


def played(engine, play, deadline=None, during=None):
    async def main():
        made = TrajectoryRun("t/0", TASK, engine, RENDERER, PARAMS, LIMITS, deadline=deadline() if deadline else Deadline())
        job = asyncio.ensure_future(made.to_end(opens(FakeEnv()), play))
        if during is not None:
            await during(made)
        return await job

    trajectory = run(main())
    engine.check_idle()
    return trajectory


async def twice(run, env):
    await run.sample(RENDERER.prompt(run.task, []), Origin.PROMPT)
    await run.sample(RENDERER.encode("again"), Origin.ENVIRONMENT)
    return Outcome.COMPLETED


def test_its_turns_are_kept_as_any():
    trajectory = played(FakeEngine(turns(says("a"), says("b"))), twice)
    assert trajectory.outcome is Outcome.COMPLETED
    assert [turn.message.content for turn in trajectory.turns] == ["a", "b"]
    assert trajectory.turns[1].context == RENDERER.encode("again")


def test_an_abort_ends_it_and_it_samples_nothing_more():
    engine = FakeEngine(turns([chunk("half"), HANG], says("b")))

    async def abort(made):
        while not engine.chunks:
            await asyncio.sleep(0)
        await engine.abort(made.request)

    trajectory = played(engine, twice, during=abort)
    assert (trajectory.outcome, trajectory.error) == (Outcome.ABORTED, None)
    assert [turn.finish for turn in trajectory.turns] == [Finish.ABORT]
    assert len(engine.requests) == 1


def test_its_time_ends_wherever_it_is():
    async def idles(run, env):
        await asyncio.Event().wait()

    trajectory = played(FakeEngine(turns()), idles, lambda: Deadline.after(0.05))
    assert trajectory.outcome is Outcome.TIMEOUT and trajectory.error.where == "rollout.play"


def test_a_pause_does_not_count():
    pauses = Pauses()

    async def waits(run, env):
        await asyncio.sleep(0.3)
        return Outcome.COMPLETED

    async def pause(made):
        pauses.begin()
        await asyncio.sleep(0.25)
        pauses.end()

    trajectory = played(FakeEngine(turns()), waits, lambda: Deadline.after(0.15, pauses=pauses), pause)
    assert trajectory.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("outcome", "length", "num_turns", "cut"),
    [
        (Outcome.TRUNCATED, 1000, 1, 1),
        (Outcome.COMPLETED, 1000, 1, 0),  # it ended well without the turn
        (Outcome.TRUNCATED, 1, 4, 0),  # the number of turns cut it
    ],
)
def test_an_answer_that_leaves_no_room_is_counted_as_in_any_trajectory(outcome, length, num_turns, cut):
    async def play(run, env):
        await run.sample(RENDERER.prompt(run.task, []), Origin.PROMPT)
        while await run.sample(ids("a") * length, Origin.ENVIRONMENT) is not None:
            pass
        return outcome

    trajectory = played(FakeEngine(lambda request: says("a")), play)
    assert (trajectory.outcome, len(trajectory.turns)) == (outcome, num_turns)
    assert trajectory.counts.get("cut_by_answer", 0) == cut


@pytest.mark.parametrize("answer", [None, "done", 3])
def test_what_is_no_outcome_is_told(answer):
    async def ends(run, env):
        return answer

    trajectory = played(FakeEngine(turns()), ends)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert trajectory.error.message.startswith(f"rollout.play returned {answer!r}; return how the trajectory ended")


class PlaysBoth(FakeEnv):
    """An environment that plays two turns by itself, and is never asked to step."""

    async def play(self, run):
        return await twice(run, self)

    async def step(self, reply):
        raise AssertionError("it is not asked")


@pytest.mark.parametrize("own", [False, True])
def test_an_environment_may_play_by_itself_and_a_function_of_the_user_s_comes_first(own):
    async def once(run, env):
        await run.sample(RENDERER.prompt(run.task, []), Origin.PROMPT)
        return Outcome.TRUNCATED

    engine = FakeEngine(turns(says("a"), says("b")))

    async def main():
        made = TrajectoryRun("t/0", TASK, engine, RENDERER, PARAMS, LIMITS)
        return await made.to_end(opens(PlaysBoth()), once if own else None)

    trajectory = run(main())
    assert (trajectory.outcome, len(trajectory.turns)) == ((Outcome.TRUNCATED, 1) if own else (Outcome.COMPLETED, 2))
