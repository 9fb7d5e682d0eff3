"""Conversations inside of a trajectory: however they interleave, each is a sample of its own, and every sampled token is there once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes import HANG, FakeEngine
from tests.rollout.scripted import RENDERER, STOP, TASK, FakeEnv, chunk, opens, run, says, turns
from whet.engine.base import Capabilities, EngineFailed
from whet.env.deadline import Deadline
from whet.env.dialogue import Dialogues
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.rollout.samples import samples_of
from whet.types import Finish, Message, Origin, Outcome, SamplingParams, Task, Trajectory

PARAMS = SamplingParams(999, stop_token_ids=(STOP,), seed=7)
LIMITS = Limits(max_turns=99, max_tokens=2000, max_turn_tokens=200)


def user(text):
    return Message("user", text)


def played(engine, play, limits=LIMITS, deadline=None, during=None):
    async def main():
        made = TrajectoryRun("t/0", TASK, engine, RENDERER, PARAMS, limits, deadline=deadline() if deadline else Deadline())
        job = asyncio.ensure_future(made.to_end(opens(FakeEnv()), play))
        if during is not None:
            await during(made)
        trajectory = await job
        left = [task for task in asyncio.all_tasks() if task.get_name().startswith("reply ")]
        assert not left
        return trajectory

    trajectory = run(main())
    engine.check_idle()
    return trajectory


@dataclass(frozen=True)
class Move:
    """What happens next: these conversations speak, at the same time; then they hear a text."""

    speakers: frozenset[int]
    say: str


WORDS = st.sampled_from(["12", "36", "3", "is"])
MOVES = st.lists(st.builds(Move, st.frozensets(st.integers(0, 3), min_size=1), WORDS), min_size=1, max_size=6)
KINDS = st.lists(st.booleans(), min_size=4, max_size=4).filter(any)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(KINDS, MOVES, st.integers(1, 12), st.booleans())
def test_every_sampled_token_of_what_trains_is_there_once_and_in_its_own_sample(trains, moves, max_turns, deterministic):
    async def plays(run, env):
        async with Dialogues(run) as talks:
            them = {}
            for move in moves:
                for i in sorted(move.speakers):
                    if i in them:
                        them[i].add(user(move.say))
                    else:
                        them[i] = talks.begin([Message("system", str(i)), user(move.say)], role=str(i), trains=trains[i])
                await asyncio.gather(*(them[i].reply() for i in sorted(move.speakers)))
        return Outcome.COMPLETED

    def script(request):
        return [*((t, -0.01 * (t + 1)) for t in (*RENDERER.encode(f"{request.sampling.seed % 50}"), STOP)), Finish.STOP]
    engine = FakeEngine(script, capabilities=Capabilities(10_000, deterministic, False))
    limits = Limits(max_turns, 2000, 200)
    trajectory = played(engine, plays, limits)
    assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, None)
    roles = [turn.role for turn in trajectory.turns]
    assert roles == sorted(roles, key=roles.index) and all(trains[int(role)] for role in roles)
    assert [turn.restart for turn in trajectory.turns] == [i > 0 and role != roles[i - 1] for i, role in enumerate(roles)]
    asked = {}
    for request in engine.requests:
        role = next(i for i in range(4) if tuple(request.tokens)[: len(start(i))] == start(i))
        asked.setdefault(role, []).append(request)
    for sample in samples_of(Trajectory("t/0", TASK, trajectory.turns, Outcome.COMPLETED)):
        mine, tokens, mask = asked[int(sample.role)], tuple(sample.tokens), tuple(sample.loss_mask)
        assert [sum(run) for run in split(mask)] == [len(RENDERER.encode(f"{r.sampling.seed % 50}")) + 1 for r in mine]
        assert all(tokens[: len(request.tokens)] == tuple(request.tokens) for request in mine)
    assert len(trajectory.turns) == sum(len(mine) for role, mine in asked.items() if trains[role]) <= max_turns
    assert len({request.sampling.seed for request in engine.requests}) == len(engine.requests)


def start(role):
    """Tokens that tell the roles apart."""
    text = RENDERER.render([Message("system", str(role)), user("@")], (), generate=False).split("@")[0]
    return RENDERER.rendered(text)[:-1]


def split(mask):
    """The runs of what trains."""
    runs, before = [], False
    for trains in mask:
        if trains and not before:
            runs.append([])
        if trains:
            runs[-1].append(1)
        before = trains
    return runs


async def two(run, env):
    async with Dialogues(run) as talks:
        a, b = talks.begin([user("12")], role="a"), talks.begin([user("36")], role="b")
        await asyncio.gather(a.reply(), b.reply())
    return Outcome.COMPLETED


def test_what_others_say_is_the_environments_and_the_rest_is_the_template_by_delta():
    async def plays(run, env):
        async with Dialogues(run) as talks:
            talk = talks.begin(run.task.prompt)
            assert (await talk.reply()).message.content == "12"
            talk.add(user("36"), user("3"))
            assert (await talk.reply()).message.content == "is"
        return Outcome.COMPLETED

    trajectory = played(FakeEngine(turns(says("12"), says("is"))), plays)
    first, second = trajectory.turns
    assert tuple(first.context) == RENDERER.prompt(TASK) and set(first.context_origin) == {Origin.PROMPT}
    assert tuple(second.context) == RENDERER.reply([user("36"), user("3")], first.tokens)
    assert set(second.context_origin) == {Origin.ENVIRONMENT} and not second.restart
    assert [turn.message.content for turn in trajectory.turns] == ["12", "is"]


def test_an_abort_of_one_reply_ends_all_and_keeps_what_they_had():
    engine = FakeEngine(turns([chunk("12"), HANG], [chunk("36"), HANG]))

    async def abort(made):
        while len(engine.chunks) < 2:
            await asyncio.sleep(0)
        await engine.abort(made.request)

    trajectory = played(engine, two, during=abort)
    assert (trajectory.outcome, trajectory.error) == (Outcome.ABORTED, None)
    assert [(turn.role, turn.message.content, turn.finish) for turn in trajectory.turns] == [
        ("a", "12", Finish.ABORT),
        ("b", "36", Finish.ABORT),
    ]


def test_a_lost_engine_is_no_fault_of_the_game_even_where_the_game_hides_it():
    async def hides(run, env):
        async with Dialogues(run) as talks:
            a, b = talks.begin([user("12")]), talks.begin([user("36")])
            await asyncio.gather(a.reply(), b.reply(), return_exceptions=True)
        return Outcome.COMPLETED

    trajectory = played(FakeEngine(turns([chunk("12"), EngineFailed("it is gone")], says("36"))), hides)
    assert trajectory.outcome is Outcome.ABORTED and trajectory.error.kind == "EngineFailed"
    assert [turn.message.content for turn in trajectory.turns] == ["12", "36"]


def test_a_deadline_keeps_what_was_sampled():
    trajectory = played(FakeEngine(turns([chunk("12"), HANG], says("36"))), two, deadline=lambda: Deadline.after(0.1))
    assert trajectory.outcome is Outcome.TIMEOUT
    assert [(turn.message.content, turn.finish) for turn in trajectory.turns] == [("12", Finish.ABORT), ("36", Finish.STOP)]


def test_an_error_of_the_game_ends_its_other_replies():
    async def breaks(run, env):
        async with Dialogues(run) as talks:
            hanging = talks.begin([user("12")])
            asyncio.ensure_future(hanging.reply()).add_done_callback(lambda done: done.cancelled() or done.exception())
            while not engine.chunks:
                await asyncio.sleep(0)
            raise KeyError("rules")

    engine = FakeEngine(turns([chunk("12"), HANG]))
    trajectory = played(engine, breaks)
    assert trajectory.outcome is Outcome.ENV_ERROR and trajectory.error.kind == "KeyError"
    assert [turn.message.content for turn in trajectory.turns] == ["12"]


def test_a_player_that_a_game_does_not_wait_for_any_more_is_over_and_the_others_go_on():
    async def impatient(run, env):
        async with Dialogues(run) as talks:
            slow, quick = talks.begin([user("12")]), talks.begin([user("36")])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await slow.reply()
            assert (await quick.reply()).message.content == "36"
            slow.add(user("3"))
            assert await slow.reply() is None
        return Outcome.COMPLETED

    trajectory = played(FakeEngine(turns([chunk("12"), HANG], says("36"))), impatient)
    assert trajectory.outcome is Outcome.COMPLETED
    assert [(turn.message.content, turn.finish) for turn in trajectory.turns] == [("12", Finish.ABORT), ("36", Finish.STOP)]


def test_a_prompt_without_room_is_refused_and_a_later_turn_without_room_is_none():
    async def plays(run, env):
        async with Dialogues(run) as talks:
            talk = talks.begin([user("12")])
            assert await talk.reply() is not None
            talk.add(user("36" * 500))
            assert await talk.reply() is None
            assert talks.cut
        return Outcome.TRUNCATED

    assert played(FakeEngine(turns(says("12"))), plays, Limits(9, 200, 100)).outcome is Outcome.TRUNCATED
    refused = played(FakeEngine(turns()), plays, Limits(9, 3, 100))
    assert refused.outcome is Outcome.REFUSED and "rollout.max_tokens = 3" in refused.error.message


def test_two_replies_at_once_and_a_reply_to_nothing_are_mistakes_of_the_game():
    async def twice(run, env):
        async with Dialogues(run) as talks:
            talk = talks.begin([user("12")])
            await asyncio.gather(talk.reply(), talk.reply())

    async def to_nothing(run, env):
        async with Dialogues(run) as talks:
            talk = talks.begin([user("12")])
            await talk.reply()
            await talk.reply()

    for play, text in ((twice, "one reply at a time"), (to_nothing, "call add")):
        trajectory = played(FakeEngine(turns(says("12"), says("12"))), play)
        assert trajectory.outcome is Outcome.ENV_ERROR and text in trajectory.error.message


def test_a_task_of_text_begins_a_conversation_as_it_is():
    async def plays(run, env):
        run.task = Task("t", "12*3=")
        async with Dialogues(run) as talks:
            await talks.begin(run.task.prompt).reply()
        return Outcome.COMPLETED

    trajectory = played(FakeEngine(turns(says("36"))), plays)
    assert tuple(trajectory.turns[0].context) == RENDERER.plain("12*3=")
