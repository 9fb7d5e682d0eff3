"""Copies of the engine in processes of their own: one engine to whoever uses it, and no process outlives it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.engine_setup import CONFIGS, DEADLINE_S, engine_of, reply_to
from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.pool.config import PoolConfig, Supervision
from whet.engine.publish import EnginePublisher, SyncError
from whet.engine.workers.copies import EngineCopies
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.model.shared import attach, share
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.apply import Arrived, copy_weights
from whet.types import Finish, Request, SamplingParams, Scored

SIZES = EmbeddedConfig(cache_tokens=2048, block_size=4, max_running=32, max_batch_tokens=256, copies=2)


def model(seed=0):
    return random_causal(CONFIGS["small"](), ModelConfig(path="", dtype="float64", device="cpu"), seed=seed)


def copies_of(held, *, devices=(), deterministic=False, **more):
    sizes = SIZES.model_copy(update={"copy_devices": devices})
    return EngineCopies(held, sizes, deterministic=deterministic, **more)


def requests(num, max_tokens=12, temperature=1.0):
    return [
        Request(f"r{i}", tuple((5 * i + k) % 97 for k in range(3 + i % 7)), SamplingParams(max_tokens, temperature, seed=i))
        for i in range(num)
    ]


async def play(engine, asked):
    replies = await asyncio.wait_for(asyncio.gather(*(reply_to(engine, request) for request in asked)), DEADLINE_S)
    return [(reply.tokens, reply.logprobs, reply.finish) for reply in replies]


VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def engine():
    """Two copies, the second with weights of its own, as on another device ("cpu:0" stands for one). Each test publishes what it needs."""
    made = copies_of(model(0), devices=("cpu", "cpu:0"))
    yield made
    made.end()


async def publish(engine, trainer):
    with ThreadPoolExecutor(1) as thread:
        backend = TorchBackend(trainer, TrainConfig(), None)
        return await EnginePublisher(backend, trainer, engine, thread).publish(next(VERSIONS))


async def play_alone(trainer, asked):
    alone = engine_of(trainer)
    try:
        return await play(alone, asked)
    finally:
        await alone.close()


def test_a_shared_model_is_one_piece_of_memory():
    mine = model()
    before = digests_of(mine.named_state())
    shared = share(mine)
    try:
        theirs = attach(shared)
    finally:
        shared.path.unlink()
    assert digests_of(mine.named_state()) == before == digests_of(theirs.named_state())
    with torch.no_grad():
        next(mine.hf.parameters()).add_(1.0)
    assert digests_of(theirs.named_state()) == digests_of(mine.named_state()) != before


def test_replies_are_those_of_one_engine_and_both_copies_work(engine):
    asked = [*requests(16), *(replace(request, id=f"greedy {request.id}") for request in requests(8, temperature=0.0))]
    seen = set()

    async def main():
        await publish(engine, model(5))
        playing = asyncio.ensure_future(play(engine, asked))
        while not playing.done():
            seen.update(i for i, found in enumerate(engine.slots) if found.load)
            await asyncio.sleep(0.001)
        return await playing

    many = asyncio.run(main())
    assert seen == {0, 1} and [found.load for found in engine.slots] == [0, 0]
    for (tokens, logprobs, finish), (same, close, end) in zip(asyncio.run(play_alone(model(5), asked)), many, strict=True):
        assert (tokens, finish) == (same, end)
        assert close == pytest.approx(logprobs, abs=1e-9)


def test_new_weights_reach_every_copy_and_replies_go_on_under_them(engine):
    async def main():
        first = await publish(engine, model(0))
        long = asyncio.gather(*(reply_to(engine, request) for request in requests(6, max_tokens=100)))
        await asyncio.sleep(0.02)
        second = await publish(engine, trainer := model(3))
        replies = await asyncio.wait_for(long, DEADLINE_S)
        assert second.receipt.resident == digests_of(trainer.named_state()) != first.receipt.resident
        with pytest.raises(ValueError, match=f"holds version {engine.version} already"):
            await engine.update(trainer.named_weights(), engine.version)
        with pytest.raises(ValueError, match="missing, unknown or of another shape"):
            await engine.update([("nothing", torch.zeros(1))], next(VERSIONS))
        return replies, {first.receipt.version, second.receipt.version}, await play(engine, requests(8))

    replies, versions, after = asyncio.run(main())
    assert all(set(reply.versions) <= versions and len(reply.tokens) == 100 for reply in replies)
    assert any(set(reply.versions) == versions for reply in replies), "a reply goes on under new weights, and says so"
    assert [tokens for tokens, _, _ in after] == [tokens for tokens, _, _ in asyncio.run(play_alone(model(3), requests(8)))]


@pytest.mark.parametrize(("fault", "words"), [("changed", "mlp.up_proj.weight"), ("skipped", "lm_head.weight|embed_tokens.weight")])
def test_a_fault_in_the_shared_weights_is_caught_and_named(engine, fault, words, monkeypatch):
    def put(own, wire, *, digest):
        arrived = Arrived({}, 0)
        if fault == "changed":
            arrived = copy_weights(own, wire, digest=digest)
            with torch.no_grad():
                own["model.layers.0.mlp.up_proj.weight"][1, 2] += 1e-6
        return arrived

    asyncio.run(publish(engine, model(1)))
    monkeypatch.setattr("whet.transport.shared.copy_weights", put)
    with pytest.raises(SyncError, match=f"engine copy 0 received other weights than the trainer's: .*({words})"):
        asyncio.run(publish(engine, model(2)))


def test_copies_that_disagree_are_not_believed(engine, monkeypatch):
    asyncio.run(publish(engine, model(1)))
    score = type(engine.members[1]).score

    async def wrong(self, *arguments):
        found = await score(self, *arguments)
        return Scored((found.logprobs[0] + 0.5, *found.logprobs[1:])) if self is engine.members[1] else found

    monkeypatch.setattr(type(engine.members[1]), "score", wrong)
    with pytest.raises(EngineFailed, match=r"engine copy 1 scores the same tokens 0\.5 nats away from engine copy 0"):
        asyncio.run(engine.score((1, 2, 3)))


def test_it_can_be_paused_asked_refused_and_aborted(engine):
    async def main():
        await engine.pause()
        waiting = asyncio.gather(*(reply_to(engine, request) for request in requests(4)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await engine.resume()
        assert all(reply.finish is Finish.LENGTH for reply in await asyncio.wait_for(waiting, DEADLINE_S))
        assert len((await engine.score((1, 2, 3, 4))).logprobs) == 3
        await engine.flush()
        with pytest.raises(EngineRefused, match="over the limit"):
            await reply_to(engine, Request("long", (1,) * 500, SamplingParams(10)))
        long = asyncio.ensure_future(reply_to(engine, Request("x", (1, 2), SamplingParams(200))))
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="'x' is already running"):
            await reply_to(engine, Request("x", (1, 2), SamplingParams(5)))
        await engine.abort("x")
        assert (await asyncio.wait_for(long, DEADLINE_S)).finish is Finish.ABORT
        dropped = engine.generate(Request("y", (1, 2), SamplingParams(200), chunk_tokens=1))
        await anext(dropped)
        await dropped.aclose()
        assert (await play(engine, requests(2)))[0][2] is Finish.LENGTH

    asyncio.run(main())


def test_no_copy_is_started_for_a_transport_that_cannot_be_had(monkeypatch):
    def refuses(*_):
        raise ValueError("its tensors cannot be written one after another")

    class Launcher:
        address = "127.0.0.1"

        def start(self, name, setup, pipes=(), *, given_up):
            raise AssertionError("who would end it?")

    monkeypatch.setattr("whet.engine.workers.copies.sender_of", refuses)
    with pytest.raises(ValueError, match="one after another"):
        copies_of(model(), launcher=Launcher())


def test_an_id_may_be_used_again_while_answers_to_the_last_are_on_their_way(engine):
    copy = engine.members[0]
    given_up = Request("z", (1, 2), SamplingParams(200), chunk_tokens=1)
    wanted = Request("z", (5, 6, 7), SamplingParams(8, seed=3), chunk_tokens=1)

    async def main():
        expected = (await reply_to(copy, replace(wanted, id="alone"))).tokens
        before = copy.generate(given_up)
        await anext(before)
        with copy._calls._lock:  # nothing reaches the copy meanwhile, and it goes on with what it has
            await before.aclose()
            asked = asyncio.ensure_future(reply_to(copy, wanted))
            await asyncio.sleep(0.2)
        assert (await asked).tokens == expected

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.mark.long
def test_a_copy_that_dies_is_named_and_the_others_take_over_its_requests():
    told = []

    async def main():
        engine = copies_of(model(), pool=PoolConfig(restarts=0), on_incident=told.append)
        children = [found._links[0].process.child for found in engine.members]
        memory = engine._memory._named
        try:
            for i, conversation in enumerate(("a", "b")):
                engine.open(conversation)
                assert conversation in engine.slots[i].conversations, "new conversations go where the fewest are"
            asked = [Request(c, (1, 2), SamplingParams(200), conversation=c) for c in ("a", "b")]
            running = [asyncio.ensure_future(reply_to(engine, request)) for request in asked]
            await asyncio.sleep(0.05)
            children[0].kill()
            first, second = await asyncio.wait_for(asyncio.gather(*running), DEADLINE_S)
            assert (await reply_to(engine, Request("again", (1, 2), SamplingParams(2), conversation="a"))).finish is Finish.LENGTH
            assert [slot.conversations for slot in engine.slots] == [set(), {"a", "b"}]
            children[1].kill()
            with pytest.raises(EngineFailed, match=r"(?s)no engine is left, .* engine copy 1: engine copy 1 died \(killed by signal 9\)"):
                await reply_to(engine, Request("last", (1, 2), SamplingParams(200), conversation="a"))
            return first, second
        finally:
            await engine.close()
            assert [child.returncode for child in children] == [-signal.SIGKILL] * 2, "no process is left"
            assert not memory.exists(), "and no file"
            with pytest.raises(EngineFailed, match="the engine was closed"):
                await reply_to(engine, requests(1)[0])

    first, second = asyncio.run(main())
    assert first.tokens == second.tokens == asyncio.run(play_alone(model(), [Request("a", (1, 2), SamplingParams(200))]))[0][0]
    assert [incident.name for incident in told] == ["engine copy 0", "engine copy 1"]
    assert all(incident.cause.startswith(f"{incident.name} died (killed by signal 9)") for incident in told)
    assert told[0].then == "it is not started again, 1 of 2 go on" and "of at most 200 sampled" in told[0].in_flight[0]


QUICK = Supervision(restart_backoff_s=0.05, health_every_s=0.2, health_timeout_s=2.0)


@pytest.mark.long
def test_copies_that_die_hang_and_miss_an_update_are_replaced_and_no_reply_changes(tmp_path, monkeypatch):
    """One copy is killed in decoding, the other is stopped, then one is killed while it takes over weights."""
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\necho spied on $4\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = []

    async def restored(engine, count):
        async with asyncio.timeout(DEADLINE_S):
            while engine._supervisor.num_restarts < count or len(engine._supervisor.up) < 2:
                await asyncio.sleep(0.02)

    def disturb(engine, slot, number):
        os.kill(engine.slots[slot].member._links[0].process.child.pid, number)

    async def disturbed(engine, asked, slot, number):
        playing = asyncio.ensure_future(play(engine, asked))
        async with asyncio.timeout(DEADLINE_S):
            while not any(reply.num_sampled and name in engine.slots[slot].requests for name, reply in engine._requests.replies.items()):
                await asyncio.sleep(0.002)
        disturb(engine, slot, number)
        return await playing

    async def main():
        engine = copies_of(model(0), pool=QUICK, on_incident=told.append)
        try:
            asked = [*requests(6, 150), *(replace(request, id=f"g{request.id}") for request in requests(2, 150, 0.0))]
            killed = await disturbed(engine, asked, 0, signal.SIGKILL)
            await restored(engine, 1)
            stopped = await disturbed(engine, asked, 1, signal.SIGSTOP)
            await restored(engine, 2)
            send = engine._weights._sender.send

            def cut(ticket, weights):
                disturb(engine, 0, signal.SIGKILL)
                return send(ticket, weights)

            monkeypatch.setattr(engine._weights._sender, "send", cut)
            long = asyncio.ensure_future(play(engine, requests(4, 200)))
            await publish(engine, model(3))
            assert {len(tokens) for tokens, _, _ in await long} == {200}
            await restored(engine, 3)
            return killed, stopped, await play(engine, requests(8)), engine.metrics()
        finally:
            await engine.close()

    killed, stopped, after, metrics = asyncio.run(main())
    asked = [*requests(6, 150), *(replace(request, id=f"g{request.id}") for request in requests(2, 150, 0.0))]
    for expected, *found in zip(asyncio.run(play_alone(model(0), asked)), killed, stopped, strict=True):
        for tokens, logprobs, finish in found:
            assert (tokens, finish) == (expected[0], expected[2]) and logprobs == pytest.approx(expected[1], abs=1e-9)
    assert [tokens for tokens, _, _ in after] == [tokens for tokens, _, _ in asyncio.run(play_alone(model(3), requests(8)))]
    assert metrics["engine/restarts"].value == 3 and metrics["engine/retried_requests"].value >= 2
    died, hung, cut = told
    assert died.cause.startswith("engine copy 0 died (killed by signal 9)") and died.in_flight
    assert "engine copy 1: a look at its health" in hung.cause and hung.stacks["engine copy 1"].startswith("spied on ")
    assert "most recent call first" in hung.stacks["engine copy 0"], "the others say where they are by themselves"
    assert cut.name == "engine copy 0" and "killed by signal 9" in cut.cause


@pytest.mark.long
def test_copies_end_with_a_trainer_that_was_killed():
    script = (
        "import tests.engine.test_engine_copies as t; e = t.copies_of(t.model());"
        "print(*[c._links[0].process.child.pid for c in e.members], flush=True); import time; time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + DEADLINE_S
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a copy outlived its trainer"
        time.sleep(0.1)
    assert len(pids) == 2


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
