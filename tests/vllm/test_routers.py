"""Conversations of several turns at two servers, by whet's own choice and behind the routers of others (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.serve.serve_setup import live
from tests.vllm.routers import STICKY, router
from tests.vllm.servers import starter
from whet.engine.base import EngineFailed
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.engine.servers.behind_router import ServersBehindRouter
from whet.engine.servers.start import ServerAt
from whet.engine.sglang.start import Sglang
from whet.engine.vllm.start import Vllm
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.meta import without_contents
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig
from whet.types import Request, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
NUM_CONVERSATIONS, NUM_TURNS = 64, 3
PROMPT_TOKENS, REPLY_TOKENS = 140, 12
DEADLINE_S = 300
MAX_SHARE = 0.545
"""Of the requests, at either of two servers: then the two are within 20 % of each other."""


async def converse(member, first):
    """Play conversations, each turn with all that was before."""

    async def turns(i):
        tokens = [first + i % 7, i // 7, *((i * 13 + j * 7) % 200 + 10 for j in range(PROMPT_TOKENS))]
        name = f"conversation {first} {i}"
        member.open(name)
        for turn in range(NUM_TURNS):
            sampling = SamplingParams(REPLY_TOKENS, seed=i)
            async for chunk in member.generate(Request(f"{name} {turn}", tuple(tokens), sampling, conversation=name)):
                tokens += chunk.tokens
            tokens += [5 + turn] * 4
        member.release(name)

    await asyncio.wait_for(asyncio.gather(*map(turns, range(NUM_CONVERSATIONS))), DEADLINE_S)


def pool_of(members, folder):
    model = load_causal(folder, ModelConfig(path=str(folder), device="cpu"), trainable=True)
    bare = without_contents(model)
    config = PoolConfig(restarts=0)

    def no_other(given_up):
        raise AssertionError("a server was lost")

    slots = [Slot(member.name, no_other, member, breaker_of(config)) for member in members]
    sender = sender_of(SyncConfig(transport="disk"), bare, folder, "127.0.0.1")
    return EnginePool(slots, WeightSync(sender, dict(bare.named_weights())), config, deterministic=False, tolerance=1e-3)


def behind(kind, url, servers, decode):
    given = {f"{kind.name} {i}": each for i, each in enumerate(servers)}
    return ServersBehindRouter(kind, f"{kind.name} router", url, given, decode, None, 1e-3, 30.0)(threading.Event())


@pytest.fixture(scope="module")
def vllm_servers(folder, decode):
    """Two vLLM servers."""
    with ExitStack() as opened:
        made = []
        for i in range(2):
            member = starter(f"vllm {i}", folder, decode, args={"block_size": 32})(threading.Event())
            opened.callback(member.stop)
            made.append(member)
        yield made


@pytest.mark.parametrize("through", ["pool", "vllm_router"])
def test_two_vllm_servers_share_conversations_and_keep_each(vllm_servers, folder, decode, through, capsys):
    urls = [member._server.url for member in vllm_servers]

    async def uses():
        return [await member._wire.prefix_use() for member in vllm_servers]

    async def play(member):
        before = await uses()
        await converse(member, 100 if through == "pool" else 120)
        return [now.since(then) for now, then in zip(await uses(), before, strict=True)]

    with ExitStack() as opened:
        if through == "pool":
            found = asyncio.run(play(pool_of(vllm_servers, folder)))
        else:
            url = opened.enter_context(router(through, urls))
            member = behind(Vllm(), url, urls, decode)
            found = asyncio.run(play(member))
            assert member.receivers == [name for each in vllm_servers for name in each.receivers]
    asked, cached = sum(use.asked for use in found), sum(use.cached for use in found)
    with capsys.disabled():
        print(f"\n{through}: {[use.asked for use in found]} prompt tokens, {cached / asked:.3f} of them from the prefix cache")
    assert max(use.asked for use in found) <= MAX_SHARE * asked
    assert cached / asked > 0.55, "two turns of three find the one before, in whole blocks of 32 tokens"


@pytest.mark.parametrize("name", STICKY)
def test_servers_of_sglangs_routes_behind_each_router(folder, decode, name, capsys):
    with ExitStack() as opened:
        servers = [opened.enter_context(live(folder)) for _ in range(2)]
        seen = [Counter(), Counter()]
        for server, counter in zip(servers, seen, strict=True):
            generate = server.service.engine.generate

            def counted(request, generate=generate, counter=counter):
                counter[tuple(request.tokens[:2])] += 1
                return generate(request)

            server.service.engine.generate = counted
        urls = [server.url for server in servers]
        member = behind(Sglang(), opened.enter_context(router(name, urls)), urls, decode)
        asyncio.run(converse(member, 140))
        use = asyncio.run(member._wire.prefix_use())
    counts = [sum(counter.values()) for counter in seen]
    with capsys.disabled():
        print(f"\n{name}: {counts} requests, {use.cached / use.asked:.3f} of the prompt tokens from the prefix cache")
    assert sum(counts) >= NUM_CONVERSATIONS * NUM_TURNS and max(counts) <= MAX_SHARE * sum(counts)
    assert not seen[0].keys() & seen[1].keys(), "the turns of a conversation stay at one server"
    assert use.cached / use.asked > 0.55


def test_an_answer_that_a_router_cut_down_is_an_error(folder, decode):
    """The frozen router drops the wish for the ids that a token was drawn from."""
    with live(folder) as server, router("sglang_router", [server.url]) as url:
        member = behind(Sglang(), url, [server.url], decode)

        async def play():
            return [chunk async for chunk in member.generate(Request("r", (5, 6, 7), SamplingParams(4, top_p=0.5, nucleus=True)))]

        with pytest.raises(EngineFailed, match="some routers lose `return_sampling_mask`"):
            asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
        direct = ServerAt(Sglang(), "sglang 0", server.url, decode, None, 10.0)(threading.Event())

        async def direct_play():
            return [chunk async for chunk in direct.generate(Request("r", (5, 6, 7), SamplingParams(4, top_p=0.5, nucleus=True)))]

        assert sum(len(chunk.tokens) for chunk in asyncio.run(direct_play())) == 4
