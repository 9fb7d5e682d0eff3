"""A pool over servers: a `Member` needs no process, tensor or shared memory of this machine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.engine.engine_setup import DEADLINE_S, reply_to
from tests.engine.http_member import SERVED, EngineServer, FolderMember, HttpMember, ServerPool
from tests.engine.test_engine_conformance import model
from tests.fakes import by_place, drawn
from whet.engine.base import EngineFailed, EngineLost
from whet.engine.pool.member import State
from whet.engine.publish import EnginePublisher, SyncError
from whet.model.digest import digests_of
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.base import Stream
from whet.types import Finish, Request, SamplingParams

PROMPT = (1, 2, 3)


def ask(name, num=100, conversation="", chunk=4):
    return Request(name, PROMPT, SamplingParams(num, seed=1), conversation=conversation, chunk_tokens=chunk)


def expected(num=100):
    return tuple(drawn(1, len(PROMPT) + i) for i in range(num))


def halting(gate):
    """A script that waits for an event after 40 tokens of a reply that began here."""

    def script(request):
        for place, item in enumerate(by_place(request)):
            if place == 40 and not request.num_begun:
                yield gate
            yield item

    return script


def serve(pool, play):
    async def bounded():
        try:
            return await asyncio.wait_for(play(pool), DEADLINE_S)
        finally:
            await pool.close()

    return asyncio.run(bounded())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("beside", ["server", "fake"])
def test_a_server_that_dies_in_the_middle_of_a_reply_costs_no_token(beside):
    never = asyncio.Event()
    fake = FolderMember(by_place, name="fake", capabilities=SERVED)
    fake.model = model()
    pool = ServerPool(model(), 2 if beside == "server" else 1, {} if beside == "server" else {"fake": fake}, halting(never))

    async def play(pool):
        pool.open("c")
        reading = asyncio.ensure_future(reply_to(pool, ask("r", conversation="c")))
        await until(lambda: pool._requests.replies.get("r") and pool._requests.replies["r"].num_sampled == 40)
        await asyncio.to_thread(pool.servers[0].die)
        reply = await reading
        await until(lambda: pool.slots[0].state is State.SERVING)
        return reply

    reply = serve(pool, play)
    assert reply.tokens == expected() and reply.logprobs == tuple(-float(token) for token in expected())
    other = fake if beside == "fake" else pool.servers[1].engine
    (again,) = other.requests
    assert again.num_begun == 40 and again.tokens == (*PROMPT, *expected(40)) and again.sampling.max_tokens == 60
    assert pool.slots[1].conversations == {"c"}
    assert pool.told[0].name == "server 0" and "it is started again" in pool.told[0].then
    assert len(pool.servers) == (3 if beside == "server" else 2)


def test_a_version_reaches_servers_by_ticket_and_is_proven_and_a_new_server_catches_up():
    fake = FolderMember(by_place, name="fake", capabilities=SERVED)
    fake.model = model()
    pool = ServerPool(model(), 1, {"fake": fake})

    async def play(pool):
        receipt = await pool.update(Stream(model(5).named_weights()), 1)
        assert [found.engine for found in receipt.members] == ["server 0", "fake"]
        assert all(dict(found.resident) == digests_of(model(5).named_weights()) for found in receipt.members)
        score = await pool.score(PROMPT)
        await asyncio.to_thread(pool.servers[0].die)
        await until(lambda: len(pool.servers) == 2 and pool.slots[0].state is State.SERVING)
        assert pool.servers[1].engine.version == 1 and pool.servers[1].engine.weights == fake.weights
        assert await pool.score(PROMPT) == score, "both members are asked, and agree"
        assert (await reply_to(pool, ask("r", 5))).versions == (1,) * 5

    serve(pool, play)


def test_a_server_that_took_other_weights_never_serves():
    pool = ServerPool(model(), 2)

    async def play(pool):
        await pool.update(Stream(model(5).named_weights()), 1)
        await pool.score(PROMPT)
        pool.servers[1].engine.weights = {}
        with pytest.raises(EngineFailed, match=r"server 1 scores the same tokens .* nats away from server 0"):
            await pool.score(PROMPT)

    serve(pool, play)


def test_a_member_that_is_killed_is_cut_off_though_its_server_goes_on():
    gate = asyncio.Event()
    server = EngineServer(model(), halting(gate))
    member = HttpMember("far", server.port)

    async def main():
        assert (await member.health()).step_s == 0.0 and member.stacks(lost=True) == ""
        chunks = member.generate(ask("r"))
        assert (await anext(chunks)).tokens == expected(4)
        waiting = asyncio.ensure_future(_rest(chunks))
        await until(lambda: len(server.engine.sampled) == 40)
        await asyncio.to_thread(member.kill)
        with pytest.raises(EngineLost, match="far was cut off"):
            await waiting
        for call in (member.pause(), member.health(), member.abort("r")):
            with pytest.raises(EngineLost, match="far was cut off"):
                await call
        again = HttpMember("far", server.port)
        assert (await reply_to(again, ask("s", 5))).finish is Finish.LENGTH, "the server serves others"
        await asyncio.to_thread(again.stop)
        await asyncio.to_thread(server._thread.join, 10)
        assert not server._thread.is_alive()
        with pytest.raises(EngineFailed, match="far did not start"):
            await asyncio.to_thread(HttpMember, "far", server.port)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


async def _rest(chunks):
    return [chunk async for chunk in chunks]


def test_where_servers_cannot_tell_what_they_hold_the_probe_decides():
    pool, trained = ServerPool(model(), 2), model(5)
    update = pool.update

    async def untold(weights, version):
        receipt = await update(weights, version)
        members = tuple(replace(found, wire=None, resident=None) for found in receipt.members)
        return replace(receipt, wire=None, resident=None, members=members)

    async def play(pool):
        pool.update = untold
        with ThreadPoolExecutor(1) as thread:
            publisher = EnginePublisher(TorchBackend(trained, TrainConfig(), None), trained, pool, thread)
            with pytest.raises(SyncError, match="the engine scores the probe"):  # these servers compute no log-prob of a model
                await publisher.publish(1)
        assert pool.paused, "nothing is sampled of what is not proven"

    serve(pool, play)
