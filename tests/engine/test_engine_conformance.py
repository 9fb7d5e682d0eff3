"""What every engine owes its callers (`whet.engine.base.Engine`): one set of tests for the embedded engine, for pools and for the fakes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.engine.engine_setup import CONFIGS, DEADLINE_S, engine_of, reply_to
from tests.engine.http_member import ServerPool
from tests.engine.vllm_server import VllmPool
from tests.fakes import FakeEngine, FakeMember, FakeSender
from whet.engine.base import Capabilities, Engine, EngineFailed, EngineRefused
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.transport.base import Stream
from whet.types import Finish, Request, SamplingParams

PROMPT = (3, 1, 4, 1, 5)


def model(seed: int = 0) -> Any:
    return random_causal(CONFIGS["small"](), ModelConfig(path="", dtype="float64", device="cpu"), seed=seed)


def of_model(seed: int) -> Iterable[tuple[str, Any]]:
    return model(seed).named_weights()


def of_text(seed: int) -> Iterable[tuple[str, Any]]:
    return Stream([("w", f"weights {seed}")])


def fake_pool(exact: bool) -> Engine:
    config, sender = PoolConfig(restarts=0), FakeSender()
    members = [FakeMember(name=name, sender=sender, capabilities=Capabilities(256, False, exact)) for name in ("e0", "e1")]
    slots = [Slot(member.name, lambda given_up, member=member: member, member, breaker_of(config)) for member in members]
    return EnginePool(slots, WeightSync(sender, {}), config, deterministic=exact)


@dataclass(frozen=True)
class Kind:
    """A kind of engine, and weights for it."""

    make: Callable[[bool], Engine]
    """Makes one that is deterministic, or not."""
    weights: Callable[[int], Iterable[tuple[str, Any]]]


KINDS = {
    "embedded": Kind(lambda exact: engine_of(model(), shares=False, deterministic=exact), of_model),
    "fake": Kind(lambda exact: FakeEngine(capabilities=Capabilities(256, False, exact)), of_text),
    "pool": Kind(fake_pool, of_text),
    "servers": Kind(lambda exact: ServerPool(model(), 2), of_model),
    "vllm": Kind(lambda exact: VllmPool(model(), 2), of_model),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def serve(engine: Engine, play: Callable[[Engine], Any]) -> Any:
    async def bounded() -> Any:
        try:
            return await asyncio.wait_for(play(engine), DEADLINE_S)
        finally:
            await engine.close()

    return asyncio.run(bounded())


def ask(name: str, max_tokens: int = 20, **fields: Any) -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens, seed=sum(name.encode())), **fields)


async def begun(engine: Engine, request: Request) -> Any:
    """A request's generator, after its first chunk."""
    chunks = engine.generate(request)
    first = await anext(chunks)
    assert len(first.tokens) == 1 and first.finish is None
    return chunks


async def rest(chunks: Any) -> list[Any]:
    return [chunk async for chunk in chunks]


def test_replies_run_together_and_each_has_its_tokens_once(kind):
    async def play(engine):
        replies = await asyncio.gather(*(reply_to(engine, ask(f"r{i}", 5 + i)) for i in range(6)))
        for i, reply in enumerate(replies):
            assert reply.finish is Finish.LENGTH and len(reply.tokens) == len(reply.logprobs) == 5 + i and len(reply.chunks) == 1
        return replies

    first, again = serve(kind.make(False), play), serve(kind.make(False), play)
    assert [reply.tokens for reply in first] == [reply.tokens for reply in again]


def test_chunks_are_as_long_as_asked_for_and_a_stop_token_is_the_last(kind):
    async def play(engine):
        whole = await reply_to(engine, ask("r"))
        pieces = await reply_to(engine, ask("r", chunk_tokens=6))
        assert pieces.tokens == whole.tokens and [len(chunk.tokens) for chunk in pieces.chunks] == [6, 6, 6, 2]
        stop = whole.tokens[9]
        sampling = SamplingParams(20, seed=ask("r").sampling.seed, stop_token_ids=(stop,))
        stopped = await reply_to(engine, Request("r", PROMPT, sampling))
        assert stopped.finish is Finish.STOP and stopped.tokens == whole.tokens[: whole.tokens.index(stop) + 1]

    serve(kind.make(False), play)


def test_a_reply_goes_on_from_its_beginning(kind):
    async def play(engine):
        whole = await reply_to(engine, ask("r"))
        sampling = SamplingParams(12, seed=ask("r").sampling.seed)
        later = await reply_to(engine, Request("r", (*PROMPT, *whole.tokens[:8]), sampling, num_begun=8))
        assert whole.tokens == (*whole.tokens[:8], *later.tokens)

    serve(kind.make(False), play)


def test_an_aborted_reply_has_what_was_sampled_and_unknown_ids_are_ignored(kind):
    async def play(engine):
        await engine.abort("nothing")
        chunks = await begun(engine, ask("r", 200, chunk_tokens=1))
        await engine.abort("r")
        found = await rest(chunks)
        assert found[-1].finish is Finish.ABORT and all(chunk.finish is None for chunk in found[:-1])
        assert sum(len(chunk.tokens) for chunk in found) < 199
        assert (await reply_to(engine, ask("r", 3))).finish is Finish.LENGTH, "its id may be used again"

    serve(kind.make(False), play)


def test_an_id_is_free_once_its_reply_is_left(kind):
    async def play(engine):
        chunks = await begun(engine, ask("r", 200, chunk_tokens=1))
        with pytest.raises(ValueError, match="'r' is already running"):
            await reply_to(engine, ask("r"))
        await chunks.aclose()
        assert (await reply_to(engine, ask("r", 3))).finish is Finish.LENGTH

    serve(kind.make(False), play)


def test_what_can_never_run_is_refused_and_the_others_run(kind):
    async def play(engine):
        for wrong in (ask("long", 500), Request("empty", (), SamplingParams(3))):
            with pytest.raises(EngineRefused):
                await reply_to(engine, wrong)
        assert (await reply_to(engine, ask("r", 3))).finish is Finish.LENGTH
        return engine.capabilities.max_tokens

    assert serve(kind.make(False), play) < 500 + len(PROMPT)


def test_a_paused_engine_samples_nothing_and_scores_and_aborts(kind):
    async def play(engine):
        assert not engine.paused
        running = await begun(engine, ask("r", 100, chunk_tokens=1))
        await engine.pause()
        await engine.pause()
        assert engine.paused
        waiting = asyncio.ensure_future(reply_to(engine, ask("s", 3)))
        left = asyncio.ensure_future(rest(running))
        await asyncio.wait({waiting, left}, timeout=0.05)
        assert not waiting.done() and not left.done()
        assert len((await engine.score(PROMPT)).logprobs) == len(PROMPT) - 1
        await engine.abort("r")
        assert (await left)[-1].finish is Finish.ABORT
        await engine.resume()
        await engine.resume()
        assert not engine.paused and (await waiting).finish is Finish.LENGTH

    serve(kind.make(False), play)


def test_a_version_is_new_and_every_chunk_is_of_one(kind):
    async def play(engine):
        assert engine.version == 0
        running = await begun(engine, ask("r", 100, chunk_tokens=1))
        await engine.pause()
        receipt = await engine.update(kind.weights(1), 1)
        assert engine.paused and receipt.version == engine.version == 1 and receipt.num_stale_tokens == 0
        await engine.resume()
        assert [chunk.version for chunk in await rest(running)][-1] == 1
        for old in (0, 1):
            with pytest.raises(ValueError, match="holds version 1 already"):
                await engine.update(kind.weights(2), old)
        assert engine.version == 1
        assert set((await reply_to(engine, ask("after"))).versions) == {1}
        long = asyncio.ensure_future(reply_to(engine, ask("long", 100)))
        await begun(engine, ask("beside", 2, chunk_tokens=1))  # both are under way
        await engine.update(kind.weights(3), 3)
        reply = await long
        assert len(reply.tokens) == 100 and list(reply.versions) == sorted(reply.versions) and set(reply.versions) <= {1, 3}
        assert len(reply.chunks) == len(set(reply.versions))

    serve(kind.make(False), play)


def test_the_same_weights_score_the_same_and_other_weights_make_another_receipt(kind):
    async def play(engine):
        receipts = [await engine.update(kind.weights(seed), version) for version, seed in ((1, 1), (2, 2), (3, 1))]
        held = [receipt.resident or receipt.wire for receipt in receipts]  # a server tells what arrived
        assert held[0] == held[2] != held[1] and all(held)
        one, other = await engine.score(PROMPT), await engine.score(PROMPT)
        assert one == other

    serve(kind.make(False), play)


def test_a_flush_loses_no_request(kind):
    async def play(engine):
        whole = await reply_to(engine, ask("r", 60))
        running = await begun(engine, ask("r", 60, chunk_tokens=1))
        await engine.flush()
        assert tuple(token for chunk in await rest(running) for token in chunk.tokens) == whole.tokens[1:]

    serve(kind.make(False), play)


def test_requests_wait_for_an_engine_that_sleeps_until_it_has_new_weights(kind):
    async def play(engine):
        await engine.update(kind.weights(1), 1)
        await engine.sleep()
        waiting = asyncio.ensure_future(reply_to(engine, ask("r", 3)))
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        await engine.update(kind.weights(2), 2)
        assert set((await waiting).versions) == {2}

    serve(kind.make(False), play)


def test_a_deterministic_engine_waits_for_its_open_conversations(kind):
    async def play(engine):
        if not engine.capabilities.deterministic:
            pytest.skip("servers promise no order of steps")
        async def converse(name):
            reply = await reply_to(engine, ask(name, 3, conversation=name))
            engine.release(name)  # the others do not wait for it any more
            return reply

        for name in ("a", "b", "c", "d"):  # two for each member of a pool
            engine.open(name)
        early = [asyncio.ensure_future(converse(name)) for name in ("a", "b")]
        await asyncio.wait(early, timeout=0.05)
        assert not any(each.done() for each in early)
        late = [asyncio.ensure_future(converse(name)) for name in ("c", "d")]
        assert all(reply.finish is Finish.LENGTH for reply in await asyncio.gather(*early, *late))

    serve(kind.make(True), play)


def test_busy_seconds_never_go_back(kind):
    async def play(engine):
        found = []
        for i in range(3):
            found.append(await engine.busy_s())
            await reply_to(engine, ask(f"r{i}", 5))
        return found

    found = serve(kind.make(False), play)
    assert all(earlier <= later for earlier, later in itertools.pairwise(found))


def test_everything_ends_with_the_engine(kind):
    async def play(engine):
        running = await begun(engine, ask("r", 100, chunk_tokens=1))
        await engine.pause()
        left = asyncio.ensure_future(rest(running))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineFailed):
            await left
        with pytest.raises(EngineFailed):
            await reply_to(engine, ask("after"))
        with pytest.raises(EngineFailed):
            await engine.score(PROMPT)

    serve(kind.make(False), play)
