"""A pool over engines that are played: who gets what, what happens to those that fail, hang, die, come and leave."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeMember, FakeSender, by_place, drawn
from whet.engine.base import EngineFailed, StaleCache
from whet.engine.pool import requests as requests_module
from whet.engine.pool.breaker import Breaker
from whet.engine.pool.config import Supervision
from whet.engine.pool.member import Slot, State
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.proof import in_time
from whet.engine.pool.reply import HANDOVER_TOKENS, PooledReply
from whet.engine.pool.weights import WeightSync
from whet.transport.base import Stream
from whet.types import Chunk, Finish, Proof, Request, SamplingParams, Scored

QUICK = Supervision(
    restarts=2,
    restart_backoff_s=0.01,
    health_every_s=0.02,
    health_timeout_s=0.3,
    step_timeout_s=0.5,
    update_timeout_s=0.3,
    breaker_open_s=0.1,
)
DEADLINE_S = 20


class World:
    """A pool of played engines, and who was made."""

    def __init__(self, num=2, config=QUICK, deterministic=False, start=None):
        self.made, self.told = [], []
        self._start, self.sender = start, FakeSender()
        self.pool = EnginePool(
            [Slot(f"e{i}", self.starter(f"e{i}"), self.make(f"e{i}"), breaker_of(config)) for i in range(num)],
            WeightSync(self.sender, {}),
            config,
            deterministic=deterministic,
            on_incident=self.told.append,
        )

    def make(self, name):
        self.made.append(FakeMember(by_place, name=name, sender=self.sender))
        return self.made[-1]

    def starter(self, name):
        def start(given_up: threading.Event):
            assert not given_up.is_set()
            made = self.make(name)
            if self._start is not None:
                self._start(made)
            return made

        return start

    def run(self, play):
        async def bounded():
            try:
                return await asyncio.wait_for(play(self.pool), DEADLINE_S)
            finally:
                await self.pool.close()

        return asyncio.run(bounded())


def asked(name, num=100, seed=1, conversation="", chunk=0):
    return Request(name, (1, 2, 3), SamplingParams(num, seed=seed), conversation=conversation, chunk_tokens=chunk)


async def read(pool, request):
    chunks = [chunk async for chunk in pool.generate(request)]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return chunks


def tokens_of(chunks):
    return [token for chunk in chunks for token in chunk.tokens]


def expected(num=100, seed=1):
    return [drawn(seed, 3 + i) for i in range(num)]


def sampled(pool, name):
    return pool._requests.replies[name].num_sampled if name in pool._requests.replies else 0


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def waits(task):
    """Let everything else run, and see that the task is not done."""
    for _ in range(200):
        await asyncio.sleep(0)
        assert not task.done()


def test_new_requests_go_where_the_fewest_are_and_conversations_stay():
    world = World(3)

    async def play(pool):
        for name in "abcd":
            pool.open(name)
        assert [sorted(slot.conversations) for slot in pool.slots] == [["a", "d"], ["b"], ["c"]]
        for _ in range(2):
            await asyncio.gather(*(read(pool, asked(f"{c}", 5, conversation=c)) for c in "abcd"))
        pool.release("a")
        pool.open("e")
        pool.open("f")
        assert [sorted(slot.conversations) for slot in pool.slots] == [["d", "e"], ["b", "f"], ["c"]]
        await read(pool, asked("loose", 5))

    world.run(play)
    served = [sorted(request.conversation for request in engine.requests) for engine in world.made]
    assert served == [["a", "a", "d", "d"], ["b", "b"], ["", "c", "c"]]
    assert world.made[1].conversations == {"b", "f"}


@pytest.mark.parametrize("chunk", [0, 7])
def test_what_a_dead_member_had_begun_goes_on_elsewhere_and_nothing_is_lost_or_twice(chunk):
    world = World(2)

    async def play(pool):
        pool.open("c")
        reading = asyncio.ensure_future(read(pool, asked("r", conversation="c", chunk=chunk)))
        await until(lambda: sampled(pool, "r") >= 40)
        world.made[0].dead = True
        chunks = await reading
        await until(lambda: pool.slots[0].state is State.SERVING)
        found = pool.metrics()
        assert (found["engine/restarts"].value, found["engine/members_up"].value, found["engine/retried_requests"].value) == (1, 2, 1)
        assert pool.slots[1].conversations == {"c"} and "c" in world.made[1].conversations
        return chunks

    chunks = world.run(play)
    assert tokens_of(chunks) == expected() and [x for c in chunks for x in c.logprobs] == [-float(t) for t in expected()]
    again = world.made[1].requests[0]
    assert again.id == "r" and again.num_begun >= 40 - HANDOVER_TOKENS and again.tokens[3:] == tuple(expected()[: again.num_begun])
    assert again.sampling.max_tokens == 100 - again.num_begun and again.num_begun % (chunk or HANDOVER_TOKENS) == 0
    assert (len(chunks) == 1) == (chunk == 0)
    (incident,) = world.told
    assert incident.cause == "e0 died" and incident.then == "it is started again (1 of 2); its requests go on elsewhere"
    assert incident.in_flight[0].startswith("r: 3 tokens of context, ") and incident.stacks == {"e1": "e1 waits"}


def test_a_member_that_hangs_is_found_killed_and_replaced_whatever_the_clock_is_set_to(monkeypatch):
    settings_of_the_clock = itertools.cycle([0.0, 4e9, -4e9, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(settings_of_the_clock))
    world = World(2)

    async def play(pool):
        pool.open("c")
        reading = asyncio.ensure_future(read(pool, asked("r", conversation="c")))
        await until(lambda: sampled(pool, "r") >= HANDOVER_TOKENS)
        world.made[0].hangs = True
        chunks = await reading
        await until(lambda: len(world.made) == 3 and pool.slots[0].state is State.SERVING)
        return chunks

    assert tokens_of(world.run(play)) == expected()
    assert "e0: a look at its health" in world.told[0].cause and world.made[0].dead
    assert world.told[0].stacks == {"e0": "e0 waits", "e1": "e1 waits"}


def test_a_member_that_comes_back_while_it_is_ended_samples_nothing_more():
    world = World(2)
    world.made[0].readable.clear()
    world.made[1].holds["c"] = 64

    async def play(pool):
        pool.open("c")
        reading = asyncio.ensure_future(read(pool, asked("r", 400, conversation="c", chunk=1)))
        await until(lambda: sampled(pool, "r") >= 32)
        world.made[0].hangs = True
        await until(lambda: pool.slots[0].member is None)
        world.made[0].hangs = False
        assert not world.made[0].dead
        updating = asyncio.ensure_future(pool.update(Stream([("w", "second")]), 1))
        await waits(updating)
        world.made[0].readable.set()
        await updating
        assert world.made[0].dead, "it is gone before weights change"
        before = sampled(pool, "r")
        assert before <= 64
        world.made[1].holds.clear()
        chunks = await reading
        assert tokens_of(chunks) == expected(400)
        assert sum(len(chunk.tokens) for chunk in chunks if chunk.version == 0) <= before

    world.run(play)


def test_a_member_that_cannot_be_ended_is_told_of_and_its_requests_go_on_elsewhere():
    world = World(2)

    def kill():
        world.made[0].dead = True  # to whoever waits for it
        raise RuntimeError("e0 cannot be ended: the machine holds on to its process")

    async def play(pool):
        pool.open("c")
        world.made[0].kill = kill
        reading = asyncio.ensure_future(read(pool, asked("r", conversation="c")))
        await until(lambda: sampled(pool, "r") >= 8)
        world.made[0].hangs = True
        chunks = await reading
        await until(lambda: pool.slots[0].state is State.SERVING)
        world.made[1].hangs = True  # they are looked at all the same
        await until(lambda: pool.slots[1].state is State.SERVING and len(world.made) == 4)
        return chunks

    assert tokens_of(world.run(play)) == expected()
    assert world.told[0].cause.endswith("; e0 cannot be ended: the machine holds on to its process")


def test_another_is_started_only_when_the_lost_one_is_gone_whoever_stops_waiting():
    beside = []

    def start(made):
        beside.append([other for other in world.made if other.name == made.name and not other.dead])

    world = World(2, start=start)
    world.made[0].readable.clear()

    async def play(pool):
        pool.open("c")
        reading = asyncio.ensure_future(read(pool, asked("r", 400, conversation="c")))
        await until(lambda: sampled(pool, "r") >= 8)
        world.made[0].hangs = True
        await until(lambda: pool.slots[0].member is None)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not world.made[0].dead and len(world.made) == 2
        world.made[0].readable.set()
        await until(lambda: pool.slots[0].state is State.SERVING)
        assert world.made[0].dead and len(world.made) == 3

    world.run(play)
    assert beside == [[world.made[2]]]


def test_a_pool_that_closes_while_a_member_is_ended_leaves_nobody_behind():
    world = World(2)
    world.made[0].readable.clear()

    async def play(pool):
        await read(pool, asked("r", 5))
        world.made[0].hangs = True
        await until(lambda: pool.slots[0].member is None)
        assert not world.made[0].dead
        closing = asyncio.ensure_future(pool.close())
        await waits(closing)
        world.made[0].readable.set()
        await closing

    world.run(play)
    assert world.made[0].dead and [told.then for told in world.told] == ["it is started again (1 of 2); its requests go on elsewhere"]


def test_a_step_that_never_ends_counts_as_a_hang_though_the_member_answers():
    world = World(2)

    async def play(pool):
        world.made[1].step_s = 0.6
        await read(pool, asked("r", 10))
        await until(lambda: len(world.made) == 3)

    world.run(play)
    assert world.told[0].cause == "e1 has been in one step for 1 s (engine.pool.step_timeout_s)"


def test_a_member_that_dies_at_every_start_is_given_up_with_its_last_words():
    def start(made):
        raise EngineFailed(f"{made.name} did not start: no such device")

    world = World(2, start=start)

    async def play(pool):
        world.made[0].dead = True
        await read(pool, asked("one"))
        await until(lambda: pool.slots[0].state is State.GIVEN_UP)
        assert tokens_of(await read(pool, asked("two"))) == expected(), "the other goes on"
        world.made[1].dead = True
        with pytest.raises(EngineFailed, match=r"no engine is left, .* \(engine\.pool\.restarts = 2\): .*no such device"):
            await read(pool, asked("three"))

    world.run(play)
    assert [told.then for told in world.told if told.name == "e0"][-1] == "it is not started again, 1 of 2 go on"
    assert world.told[-1].then == "it is not started again, and no other is left"


def test_in_deterministic_mode_a_lost_member_ends_everything_with_the_cause():
    world = World(2, deterministic=True)

    async def play(pool):
        world.made[0].dead = True
        with pytest.raises(EngineFailed, match=r"e0 died\. With deterministic=true another would go on with other bits"):
            await read(pool, asked("r"))
        with pytest.raises(EngineFailed, match="e0 died"):
            await read(pool, asked("s"))
        with pytest.raises(ValueError, match="stay as they are"):
            await pool.drain("e1", 1.0)

    world.run(play)
    assert len(world.made) == 2 and world.told[0].then == "the run ends"


def test_who_fails_again_and_again_is_left_alone_and_then_tried_with_one_request():
    world = World(2)

    async def play(pool):
        world.made[0].fails = True
        for i in range(6):
            assert tokens_of(await read(pool, asked(f"r{i}", 5))) == expected(5), "another takes what failed"
        assert pool.slots[0].breaker.state == "open" and len(world.made[0].requests) == 3
        await until(lambda: pool.slots[0].breaker.state == "half_open")
        world.made[0].fails = False
        await asyncio.gather(*(read(pool, asked(f"s{i}", 20)) for i in range(3)))
        assert len(world.made[0].requests) == 4 and pool.slots[0].breaker.state == "closed"

    world.run(play)
    first, last = world.told
    assert first.cause == "e0 failed with a request and lives: e0: a step failed" and first.then == "its requests are tried elsewhere"
    assert last.then == "its requests are tried elsewhere; its circuit breaker is open" and first.in_flight[0].startswith("r0: ")


def test_a_stale_cache_is_told_once_and_nothing_is_tried_again():
    world = World(2)

    stale = StaleCache("cache block 3 holds keys and values of the weights of 1 update(s) ago")

    async def play(pool):
        world.made[0].script = lambda request: [stale]
        for conversation in "ab":
            pool.open(conversation)
        for i in range(2):
            with pytest.raises(StaleCache, match="cache block 3"):
                await read(pool, asked(f"r{i}", conversation="a"))
        assert not world.made[1].requests and pool.slots[0].breaker.state == "closed"

    world.run(play)
    (told,) = world.told
    assert "cache block 3" in told.cause and told.then.startswith("nothing is tried again")


def test_an_aborted_request_of_a_member_that_hangs_has_what_was_handed_over(monkeypatch):
    monkeypatch.setattr(requests_module, "ABORTED_S", 0.05)
    patient = QUICK.model_copy(update={"health_timeout_s": 600.0, "health_every_s": 600.0})
    world = World(1, patient)

    async def play(pool):
        reading = asyncio.ensure_future(read(pool, asked("r", 400)))
        await until(lambda: sampled(pool, "r") >= HANDOVER_TOKENS)
        world.made[0].hangs = True
        await pool.abort("r")
        (chunk,) = await reading
        assert chunk.finish is Finish.ABORT and len(chunk.tokens) >= HANDOVER_TOKENS
        assert list(chunk.tokens) == expected(400)[: len(chunk.tokens)]
        assert pool.metrics()["engine/retried_requests"].value == 0
        world.made[0].hangs = False

    world.run(play)


def test_members_end_side_by_side():
    world, meeting = World(3), threading.Barrier(3)
    for engine in world.made:
        engine.stop = lambda: meeting.wait(DEADLINE_S)

    async def play(pool):
        await read(pool, asked("r", 5))

    world.run(play)
    assert not meeting.broken


def test_an_answer_that_this_process_had_no_time_to_hear_counts():
    async def main():
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        loop.call_soon(time.sleep, 0.6)  # as a process that is stopped, or whose interpreter is held
        loop.call_later(0.7, answer.set_result, 1)
        return await in_time(answer, "to answer", 0.2)

    assert asyncio.run(main()) == 1


def test_a_member_that_comes_while_a_version_is_torn_waits_for_the_next_one():
    world = World(2)

    async def play(pool):
        await pool.update(Stream([("w", "second")]), 1)
        world.sender.cut = True
        world.sender.text = "half of the third"
        with pytest.raises(OSError, match="cut"):
            await pool.update(Stream([("w", "third")]), 2)
        world.made[0].dead = True
        await until(lambda: pool.slots[0].state is State.BEHIND)
        world.sender.cut = False
        await pool.update(Stream([("w", "third")]), 2)
        assert pool.slots[0].state is State.SERVING and world.made[2].weights == "third"
        assert tokens_of(await read(pool, asked("r"))) == expected()

    world.run(play)
    assert len(world.made) == 3 and world.told[-1].then == "e0 samples nothing until then" and "half of version 2" in world.told[-1].cause


def test_a_conversation_whose_member_leaves_has_another_home():
    world = World(1)

    async def play(pool):
        pool.open("a")
        await read(pool, asked("first", 5, conversation="a"))
        for name in ("e8", "e9"):
            await pool.join(name, world.starter(name))
        await pool.drain("e0", 1.0)
        await read(pool, asked("second", 5, conversation="a"))
        (home,) = [slot for slot in pool.slots if slot.conversations == {"a"}]
        assert home.member.conversations == {"a"}
        for i in range(3):
            await read(pool, asked(f"next{i}", 5, conversation="a"))
        assert len(home.member.requests) == 4

    world.run(play)


def test_what_every_member_fails_with_fails():
    world = World(2)

    async def play(pool):
        for engine in world.made:
            engine.fails = True
        with pytest.raises(EngineFailed, match="a step failed"):
            await read(pool, asked("r"))

    world.run(play)
    assert [len(engine.requests) for engine in world.made] == [1, 1]


def test_a_member_that_is_killed_during_an_update_comes_back_with_the_present_weights_before_it_serves():
    world = World(2)

    async def play(pool):
        for engine in world.made:
            engine.holds[""] = 40
        reading = [asyncio.ensure_future(read(pool, asked(f"r{i}", seed=i))) for i in range(2)]
        await until(lambda: min(sampled(pool, f"r{i}") for i in range(2)) >= HANDOVER_TOKENS)
        world.made[0].on_take = FakeMember.kill
        receipt = await pool.update(Stream([("w", "second")]), 1)
        assert receipt.version == 1 and receipt.resident == {"w": "second"} and pool.version == 1
        assert (await pool.score((1, 2))).logprobs == (6.0,)
        await until(lambda: pool.slots[0].state is State.SERVING)
        world.made[1].holds.clear()
        for i, chunks in enumerate(await asyncio.gather(*reading)):
            assert tokens_of(chunks) == expected(seed=i) and 1 in {chunk.version for chunk in chunks} <= {0, 1}
        await read(pool, asked("after"))

    world.run(play)
    assert [engine.updates for engine in world.made] == [[], [1], [1]]
    assert world.made[2].weights == "second" and all(request.tokens for request in world.made[2].requests)


def test_a_member_that_comes_back_while_the_others_sleep_sleeps_too_until_the_next_version():
    world = World(2)

    async def play(pool):
        await pool.update(Stream([("w", "second")]), 1)
        await pool.score((1, 2))
        await pool.sleep()
        world.made[0].kill()
        await pool.abort("nothing")
        await until(lambda: len(world.made) == 3 and pool.slots[0].state is State.SERVING)
        assert [engine.asleep for engine in world.made[1:]] == [True, True]
        await pool.update(Stream([("w", "third")]), 2)
        assert [engine.asleep for engine in world.made[1:]] == [False, False]
        assert tokens_of(await read(pool, asked("after"))) == expected()

    world.run(play)


def test_a_version_that_arrives_in_part_is_told_with_all_stacks_and_nothing_is_sampled():
    world = World(2)

    async def play(pool):
        world.sender.cut = True
        with pytest.raises(OSError, match="cut"):
            await pool.update(Stream([("w", "second")]), 1)
        for call in (read(pool, asked("r")), pool.score((1, 2)), pool.resume()):
            with pytest.raises(EngineFailed, match="half of version 1, and sample nothing: OSError: the wire was cut"):
                await call
        world.sender.cut = False
        await pool.update(Stream([("w", "second")]), 1)
        assert tokens_of(await read(pool, asked("r"))) == expected()

    world.run(play)
    (told,) = world.told
    assert "half of version 1" in told.cause and told.stacks == {"e0": "e0 waits", "e1": "e1 waits"}


def test_a_member_that_cannot_catch_up_waits_for_the_next_version():
    world = World(2)
    world.sender.sends_once = True

    async def play(pool):
        await pool.update(Stream([("w", "second")]), 1)
        world.made[0].dead = True
        await read(pool, asked("r"))
        await until(lambda: pool.slots[0].state is State.BEHIND)
        await asyncio.gather(*(read(pool, asked(f"r{i}", 5)) for i in range(4)))
        assert (await pool.score((1, 2))).logprobs == (6.0,) and not world.made[2].requests
        assert world.told[-1].cause == "it was sent once (sync.transport)" and world.told[-1].then == "e0 samples nothing until then"
        await pool.update(Stream([("w", "third")]), 2)
        await asyncio.gather(*(read(pool, asked(f"s{i}", 5)) for i in range(4)))
        assert len(world.made[2].requests) == 2 and world.made[2].updates == [2]
        for engine in world.made[1:]:
            engine.dead = True
        with pytest.raises(EngineFailed, match=r"no engine is left that holds version 2: .*it was sent once"):
            await read(pool, asked("t"))

    world.run(play)


def test_all_killed_during_an_update_come_back_with_it():
    world = World(1)

    async def play(pool):
        world.made[0].on_take = FakeMember.kill
        receipt = await pool.update(Stream([("w", "second")]), 1)
        assert receipt.resident == {"w": "second"} and pool.version == 1
        await read(pool, asked("after", 5))

    world.run(play)
    assert [engine.updates for engine in world.made] == [[], [1]]


@pytest.mark.parametrize("apart", [1e-4, float("nan")])
def test_members_whose_machines_round_otherwise_agree(apart):
    world = World(2, start=lambda made: setattr(made, "score", lambda *_: asyncio.sleep(0, Scored((6.0 + apart,)))))
    world.pool._supervisor.published.tolerance = 1e-3

    async def play(pool):
        await pool.update(Stream([("w", "second")]), 1)
        await pool.score((1, 2))
        world.made[0].dead = True
        await read(pool, asked("r"))
        if apart == apart:
            await until(lambda: pool.slots[0].state is State.SERVING)
            assert pool.later_proof == Proof(True, 1.0, pytest.approx(apart)), "compared with the others"
            scored = await pool.score((1, 2))
            assert scored.logprobs == (6.0 + apart,) and [each.logprobs for each in scored.members] == [(6.0 + apart,), (6.0,)]
            await pool.update(Stream([("w", "third")]), 2)
            assert pool.later_proof is None, "all took the new version over together"
        else:
            await until(lambda: pool.slots[0].state is State.GIVEN_UP)

    world.run(play)


@pytest.mark.parametrize("fault", ["weights", "probe", "hang"])
def test_a_member_that_comes_back_with_other_weights_never_serves(fault):
    def start(made):
        if fault == "weights":
            made.take = lambda weights, version: FakeMember.take(made, "other", version)
        if fault == "probe":
            made.score = lambda *_: asyncio.sleep(0, Scored((0.5,)))
        made.hangs = fault == "hang"

    world = World(2, start=start)

    async def play(pool):
        await pool.update(Stream([("w", "second")]), 1)
        await pool.score((1, 2))
        world.made[0].dead = True
        await read(pool, asked("r"))
        await until(lambda: pool.slots[0].state is State.GIVEN_UP)

    world.run(play)
    words = {"weights": "e0 holds other weights than were published as version 1: w", "probe": "scores the probe", "hang": "no answer"}
    assert words[fault] in world.told[-1].cause
    assert len(world.made) == 4 and not world.made[2].requests and world.made[2].dead


def test_paused_members_stay_paused_when_they_are_replaced():
    world = World(1)

    async def play(pool):
        await pool.pause()
        world.made[0].dead = True
        reading = asyncio.ensure_future(read(pool, asked("r", 5)))
        await until(lambda: len(world.made) == 2 and pool.slots[0].state is State.SERVING)
        await waits(reading)
        await pool.resume()
        assert tokens_of(await reading) == expected(5)

    world.run(play)


def test_members_join_and_leave_while_requests_run():
    world = World(1)

    async def play(pool):
        await pool.update(Stream([("w", "second")]), 1)
        pool.open("a")
        world.made[0].holds["a"] = 40
        reading = asyncio.ensure_future(read(pool, asked("r", conversation="a")))
        await until(lambda: sampled(pool, "r") >= HANDOVER_TOKENS)
        await pool.join("e9", world.starter("e9"))
        world.made[0].holds.clear()
        await pool.drain("e0", DEADLINE_S)
        assert reading.done() and tokens_of(reading.result()) == expected(), "it ended what it had"
        assert tokens_of(await read(pool, asked("next", conversation="a"))) == expected()
        with pytest.raises(ValueError, match="'e9' cannot leave the pool: no other is there"):
            await pool.drain("e9", 1.0)
        with pytest.raises(ValueError, match="has a member 'e9' already"):
            await pool.join("e9", world.starter("e9"))
        await pool.join("e10", world.starter("e10"))
        world.made[1].holds["a"] = 40
        reading = asyncio.ensure_future(read(pool, asked("long", conversation="a")))
        await until(lambda: sampled(pool, "long") >= HANDOVER_TOKENS)
        await pool.drain("e9", 0.0)
        assert tokens_of(await reading) == expected(), "what it had not ended went on elsewhere"

    world.run(play)
    first, second, third = world.made
    assert first.dead and [request.id for request in second.requests] == ["next", "long"] and second.updates == third.updates == [1]
    assert third.requests[0].id == "long" and world.told == []


def test_a_request_is_aborted_while_it_waits_for_a_member():
    world = World(1, replace_backoff(QUICK, 5.0))

    async def play(pool):
        reading = asyncio.ensure_future(read(pool, asked("r")))
        await until(lambda: sampled(pool, "r") >= HANDOVER_TOKENS)
        world.made[0].dead = True
        await until(lambda: pool.slots[0].state is State.DOWN)
        await pool.abort("r")
        return await reading

    (chunk,) = world.run(play)
    assert chunk.finish is Finish.ABORT and list(chunk.tokens) == expected()[: len(chunk.tokens)] and len(chunk.tokens) >= HANDOVER_TOKENS


def replace_backoff(config, seconds):
    return config.model_copy(update={"restart_backoff_s": seconds})


def test_waiting_requests_end_when_the_pool_closes():
    world = World(1, replace_backoff(QUICK, 5.0))

    async def play(pool):
        world.made[0].dead = True
        reading = asyncio.ensure_future(read(pool, asked("r")))
        await until(lambda: pool.slots[0].state is State.DOWN)
        await pool.close()
        with pytest.raises(EngineFailed, match="the engine was closed"):
            await reading

    world.run(play)


def test_busy_seconds_never_go_back():
    world = World(2)

    async def play(pool):
        before = await pool.busy_s()
        world.made[0].dead = True
        await read(pool, asked("r", 5))
        await until(lambda: len(world.made) == 3 and pool.slots[0].state is State.SERVING)
        assert before == 2.0 and await pool.busy_s() == 3.0

    world.run(play)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), st.sampled_from([0, 3]), st.data())
@settings(max_examples=60, deadline=None)
def test_a_reply_in_any_pieces_is_the_same(sizes, chunk, data):
    """Members hand over pieces; what goes out is every token once, with its version, in order."""
    total = sum(sizes)
    reply = PooledReply(asked("r", total, chunk=chunk))
    versions = sorted(data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes))))
    out, place = [], 0
    for i, size in enumerate(sizes):
        rest = reply.rest
        assert rest.num_begun == place and rest.sampling.max_tokens == total - place and rest.tokens[3:] == tuple(range(place))
        tokens = tuple(range(place, place + size))
        place += size
        last = i == len(sizes) - 1
        out += reply.take(Chunk(tokens, tuple(map(float, tokens)), versions[i], Finish.STOP if last else None, num_cached=i + 1))
    assert tokens_of(out) == list(range(total)) == [int(x) for c in out for x in c.logprobs]
    assert [c.version for c in out for _ in c.tokens] == [v for v, size in zip(versions, sizes, strict=True) for _ in range(size)]
    assert [c.finish for c in out] == [None] * (len(out) - 1) + [Finish.STOP] and out[0].num_cached == 1
    if not chunk:
        assert len(out) == len(set(versions))


def test_a_breaker_by_the_book():
    now = [0.0]
    breaker = Breaker(2, 10.0, lambda: now[0])
    assert breaker.failed(breaker.passed())
    breaker.succeeded(breaker.passed())
    assert breaker.failed(breaker.passed())
    assert breaker.state == "closed" and breaker.lets_pass, "only failures in a row count"
    before, later = breaker.passed(), breaker.passed()
    assert breaker.failed(breaker.passed())
    assert breaker.state == "open" and not breaker.lets_pass
    now[0] = 10.0
    assert breaker.state == "half_open" and breaker.lets_pass
    trial = breaker.passed()
    assert not breaker.lets_pass, "one at a time"
    breaker.succeeded(before)
    breaker.ended(before)
    assert not breaker.failed(later)
    breaker.ended(later)
    assert breaker.state == "half_open" and not breaker.lets_pass, "what began before it opened says nothing"
    breaker.ended(trial)
    assert breaker.lets_pass
    trial = breaker.passed()
    assert breaker.failed(trial)
    breaker.ended(trial)
    now[0] = 29.9
    assert breaker.state == "open", "twice as long"
    now[0] = 30.0
    breaker.succeeded(breaker.passed())
    assert breaker.state == "closed"
