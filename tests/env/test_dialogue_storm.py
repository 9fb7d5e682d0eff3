"""Five hundred games against an engine and rules that fail, hang, babble and are broken off: one outcome each, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.fakes import HANG, FakeEngine
from tests.rollout.scripted import RENDERER, STOP, TASK, opens
from whet.engine.base import EngineFailed, EngineRefused
from whet.env.deadline import Deadline
from whet.env.dialogue import Dialogues
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.rollout.samples import samples_of
from whet.types import Chunk, Finish, Message, Outcome, SamplingParams

pytestmark = pytest.mark.long

NUM = 500


class Stormy:
    """A game of three, one of whom does not train, that goes wrong now and then."""

    tools = ()

    def __init__(self, rng):
        self._rng, self.num_closed = rng, 0

    async def start(self, task):
        return task

    async def step(self, reply):
        raise AssertionError("it plays by itself")

    async def close(self):
        self.num_closed += 1

    async def play(self, run):
        async with Dialogues(run) as talks:
            them = [talks.begin([Message("user", str(i))], role=str(i), trains=i < 2) for i in range(3)]
            for _ in range(3):
                kind = self._rng.randrange(40)
                if kind == 0:
                    raise KeyError("rules")
                if kind == 1:
                    await asyncio.Event().wait()
                if kind == 2:
                    return "garbage"
                if kind == 3:
                    asyncio.ensure_future(them[0].reply()).add_done_callback(lambda done: done.cancelled() or done.exception())
                    return Outcome.COMPLETED
                said = await asyncio.gather(*(each.reply() for each in them), return_exceptions=kind == 4)
                if not all(said) or any(isinstance(each, BaseException) for each in said):
                    return Outcome.TRUNCATED
                for each in them:
                    each.add(Message("user", "\ufffd\x00 <tool_call>" * (30 if kind == 5 else 1)))
        return Outcome.COMPLETED


def test_five_hundred_games_in_a_storm(monkeypatch):
    monkeypatch.setattr("whet.env.dialogue.ABORT_GRACE_S", 0.2)
    monkeypatch.setattr("whet.env.sampling.ABORT_GRACE_S", 0.2)
    rng = random.Random(7)

    def script(request):
        tokens = [(token, -0.5) for token in RENDERER.encode(rng.choice(["12", "36 is", "<tool_call> 3", "The answer is 36."]))]
        kind = rng.randrange(150)
        broken = {0: EngineFailed("it is gone"), 1: EngineRefused("it never fits"), 2: ConnectionResetError("half way"), 3: HANG}
        if kind in broken:
            return [Chunk((tokens[0][0],), (-0.5,), 0), broken[kind]]
        return [*tokens, Finish.LENGTH if kind == 4 else (STOP, -0.5), *([] if kind == 4 else [Finish.STOP])]

    engine = FakeEngine(script)
    params = SamplingParams(99, stop_token_ids=(STOP,))

    async def one(i, env):
        made = TrajectoryRun(f"t/{i}", TASK, engine, RENDERER, params, Limits(9, 300, 50), deadline=Deadline.after(1.0))
        job = asyncio.ensure_future(made.to_end(opens(env)))
        if i % 25 == 0:
            while not made.request and not job.done():
                await asyncio.sleep(0)
            await engine.abort(made.request)
        if i % 40 == 1:
            await asyncio.sleep(rng.random() * 0.02)
            job.cancel()
        return (await asyncio.gather(job, return_exceptions=True))[0]

    async def main():
        envs = [Stormy(rng) for _ in range(NUM)]
        async with asyncio.timeout(120):
            found = []
            for begin in range(0, NUM, 50):
                found += await asyncio.gather(*(one(i, envs[i]) for i in range(begin, begin + 50)))
        await asyncio.sleep(0.05)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        return envs, found, left

    envs, found, left = asyncio.run(main())
    assert not left
    engine.check_idle()
    assert engine.opened == engine.released == {f"t/{i}": 1 for i in range(NUM)}
    ended = [each for each in found if not isinstance(each, asyncio.CancelledError)]
    assert all(env.num_closed <= 1 for env in envs) and sum(env.num_closed for env in envs) >= len(ended)
    assert not [each for each in ended if isinstance(each, BaseException)]
    outcomes = Counter(each.outcome for each in ended)
    assert set(outcomes) >= {*Outcome} - {Outcome.REWARD_ERROR}, outcomes
    sampled = Counter()
    for conversation, chunk in engine.chunks:
        sampled[conversation] += len(chunk.tokens)
    for trajectory in ended:
        samples = samples_of(trajectory)
        kept = sum(len(turn.tokens) for turn in trajectory.turns)
        assert kept == sum(sum(n for trains, n in sample.loss_mask.runs() if trains) for sample in samples) <= sampled[trajectory.id]
        assert [sample.role for sample in samples] == sorted({turn.role for turn in trajectory.turns})
