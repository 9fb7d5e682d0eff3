"""Servers behind a router: one engine whose router chooses who samples, and whose weights go to each server and are proven there."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from pydantic import ValidationError

from tests.engine.engine_setup import DEADLINE_S, reply_to
from tests.engine.test_engine_conformance import model
from tests.engine.test_engine_vllm import ask, expected, model_folder
from tests.engine.vllm_server import FakeVllm, letters
from whet.engine.base import EngineFailed, EngineLost, PrefixUse
from whet.engine.pool.config import PoolConfig
from whet.engine.servers.behind_router import ServersBehindRouter
from whet.engine.servers.config import ServersConfig
from whet.engine.servers.pool import Servers
from whet.engine.vllm.start import Vllm
from whet.transport.base import DiskTicket
from whet.types.columns import Ints


@contextmanager
def two_behind_a_router(second=None):
    """Two servers, and a router that sends all to the first; `second` changes a class of the second."""
    servers = [FakeVllm(model()), (second or FakeVllm)(model())]
    urls = {f"vllm {i}": server.url for i, server in enumerate(servers)}
    names = frozenset(name for name, _ in model().named_weights())
    start = ServersBehindRouter(Vllm(), "vllm router", servers[0].url, urls, letters, names, 1e-3, 5.0)
    member = start(threading.Event())
    try:
        yield servers, member
    finally:
        member.stop()
        for server in servers:
            server.die()


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


async def updated(member, version=1):
    await member.pause()
    receipt = await member.update(DiskTicket(version, model_folder()), version)
    await member.resume()
    return receipt


def test_the_router_samples_and_each_server_takes_the_weights_over():
    with two_behind_a_router() as (servers, member):

        async def play():
            before = await reply_to(member, ask("a"))
            receipt = await updated(member)
            return before, receipt, await reply_to(member, ask("b"))

        before, receipt, after = run(play())
        assert before.tokens == after.tokens == expected()
        assert [server.label for server in servers] == ["1", "1"] and receipt.version == 1
        assert [len(server.bodies) for server in servers] == [2, 0], "the router's choice"
        weights = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        assert [[call for call in server.calls if call in weights] for server in servers] == [weights] * 2
        assert member.receivers == [f"{server.url} rank 0" for server in servers]


def test_a_conversation_has_a_key_that_routers_read():
    with two_behind_a_router() as (servers, member):
        run(reply_to(member, replace(ask("a"), conversation="c 7")))
        (headers,) = servers[0].headers
        assert headers["x-session-id"] == headers["x-smg-routing-key"] == "c 7"


def test_a_server_that_received_other_weights_is_named_by_its_digests():
    class Stale(FakeVllm):
        async def _update(self, request):
            answer = await super()._update(request)
            self._digests = dict.fromkeys(self._digests, "stale")
            return answer

    with two_behind_a_router(Stale) as (_, member), pytest.raises(EngineLost, match="vllm 1 received other weights than vllm 0"):
        run(updated(member))


def test_scores_of_servers_that_disagree_are_refused():
    with two_behind_a_router() as (servers, member):

        async def play():
            await updated(member)
            servers[1]._digests = {"other": "weights"}
            await member.score(Ints((1, 2, 3)))

        with pytest.raises(EngineFailed, match=r"vllm 1 scores the same tokens .* nats away from vllm 0"):
            run(play())


@pytest.mark.parametrize("route", ["/update_weights", "/finish_weight_update", "/collective_rpc"])
def test_a_server_that_fails_in_an_update_costs_all_behind_the_router(route):
    with two_behind_a_router() as (servers, member):
        servers[1].failing[route] = 500
        with pytest.raises(EngineLost, match=r"^vllm router: version 1 arrived in part, if at all: vllm 1: .*planted"):
            run(updated(member))


def test_an_abort_reaches_the_server_that_samples():
    with two_behind_a_router() as (_, member):

        async def play():
            chunks = []
            async for chunk in member.generate(ask("long", num=200, chunk=4)):
                chunks.append(chunk)
                if len(chunks) == 1:
                    await member.abort("long")
            return chunks

        chunks = run(play())
        assert 0 < sum(len(chunk.tokens) for chunk in chunks) < 200


def test_a_cut_ends_what_waits_at_any_server():
    with two_behind_a_router() as (_, member):
        member.kill()
        with pytest.raises(EngineLost):
            run(member.pause())


def test_what_is_not_there_is_named_with_its_setting():
    with two_behind_a_router() as (servers, _):
        start = ServersBehindRouter(Vllm(), "vllm router", "http://127.0.0.1:9", {"vllm 0": servers[0].url}, letters, None, 1e-3, 0.1)
        with pytest.raises(EngineFailed, match=r"http://127.0.0.1:9 \(engine.router\) did not answer"):
            start(threading.Event())


def test_settings_of_a_router_start_one_member():
    config = ServersConfig(name="vllm", urls=["http://a:1", "http://b:1"], router="http://r:1")
    (start,) = Servers(config, model_folder(), letters).starts(model(), PoolConfig()).values()
    assert isinstance(start, ServersBehindRouter) and dict(start.servers) == {"vllm 0": "http://a:1", "vllm 1": "http://b:1"}
    with pytest.raises(ValidationError, match=r"name the servers behind the router in engine.urls"):
        ServersConfig(name="vllm", router="http://r:1")


def test_use_of_prefix_caches_counts_anew_after_a_restart():
    assert PrefixUse(5, 20).since(PrefixUse(2, 10)) == PrefixUse(3, 10)
    assert PrefixUse(1, 4).since(PrefixUse(2, 10)) == PrefixUse(1, 4)
