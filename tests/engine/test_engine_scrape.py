"""A scrape of servers: each one's own samples under its name, within a bound, and without a call of the pool's loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.engine_setup import DEADLINE_S
from tests.engine.test_engine_behind_router import two_behind_a_router
from tests.engine.test_engine_conformance import model
from tests.engine.vllm_server import VllmPool
from tests.serve.serve_setup import live, model_folder
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.scrape import PoolSource
from whet.engine.servers.http import MAX_METRICS_BYTES
from whet.engine.servers.start import ServerAt
from whet.engine.sglang.start import Sglang
from whet.observe import prometheus
from whet.observe.prometheus import PrometheusTracker
from whet.types import Request, SamplingParams

TEXT = """# HELP vllm:prefix_cache_queries_total Tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 20
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 5
"""


@pytest.fixture
def tracker():
    with contextlib.closing(PrometheusTracker("127.0.0.1:0")) as made:
        yield made


def scraped(tracker):
    with urllib.request.urlopen(tracker.url, timeout=DEADLINE_S) as answer:
        text = answer.read().decode()
    return {(s.name, *sorted(s.labels.items())): s.value for family in text_string_to_metric_families(text) for s in family.samples}


def of(found, name):
    """The values of a metric, by its server or member."""
    return {dict(labels).get("server") or dict(labels)["member"]: value for (each, *labels), value in found.items() if each == name}


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


def test_one_scrape_shows_the_pool_and_every_server(tracker):
    pool = VllmPool(model(), 2)
    tracker.source = PoolSource(pool)
    for server in pool.servers:
        server.metrics = TEXT

    async def play():
        try:
            reading = asyncio.ensure_future(anext(aiter(pool.generate(Request("r", (1, 2), SamplingParams(200), chunk_tokens=1)))))
            await reading
            found = await asyncio.to_thread(scraped, tracker)
            await pool.busy_s()
            return found, pool.metrics()["engine/prefix_hit_rate"].value
        finally:
            await pool.close()

    found, hit_rate = run(play())
    assert of(found, "whet_engine_member_up") == of(found, "whet_server_up") == {"vllm 0": 1.0, "vllm 1": 1.0}
    assert sorted(of(found, "whet_engine_member_requests_running").values()) == [0.0, 1.0]
    assert of(found, "vllm:prefix_cache_hits_total") == {"vllm 0": 5.0, "vllm 1": 5.0}
    key = ("vllm:prefix_cache_queries_total", ("engine", "0"), ("model_name", "m"), ("server", "vllm 1"))
    assert found[key] == 20.0 and hit_rate == 0.25, "the same reader finds the use of prefix caches"


def test_a_server_that_does_not_answer_in_time_is_left_out_and_the_others_are_there(tracker, monkeypatch):
    monkeypatch.setattr(prometheus, "SERVERS_S", 0.3)
    pool = VllmPool(model(), 4)
    tracker.source = PoolSource(pool)
    slow, broken, bare, good = pool.servers
    slow.metrics_wait_s = 60.0
    slow.metrics = good.metrics = TEXT
    broken.failing["/metrics"] = 500
    bare.missing.add("/metrics")

    async def play():
        try:
            began = time.monotonic()
            found = await asyncio.to_thread(scraped, tracker)
            took_s = time.monotonic() - began
            good.metrics = "x" * (MAX_METRICS_BYTES + 1)
            return found, took_s, await asyncio.to_thread(scraped, tracker)
        finally:
            await pool.close()

    found, took_s, later = run(play())
    assert of(found, "whet_server_up") == {"vllm 0": 0.0, "vllm 1": 0.0, "vllm 2": 1.0, "vllm 3": 1.0}
    assert of(found, "vllm:prefix_cache_hits_total") == {"vllm 3": 5.0} and took_s < 5
    assert of(found, "whet_engine_member_up") == dict.fromkeys(("vllm 0", "vllm 1", "vllm 2", "vllm 3"), 1.0), "they sample"
    assert of(later, "whet_server_up")["vllm 3"] == 0.0, "no text is that long"


def test_a_server_that_is_lost_is_not_up(tracker):
    pool = VllmPool(model(), 2)
    tracker.source = PoolSource(pool)

    async def play():
        try:
            first = await asyncio.to_thread(scraped, tracker)
            pool.servers[0].die()
            found = await asyncio.to_thread(scraped, tracker)
            return first, found
        finally:
            await pool.close()

    first, found = run(play())
    assert of(first, "whet_server_up") == {"vllm 0": 1.0, "vllm 1": 1.0}
    assert of(found, "whet_server_up") == {"vllm 0": 0.0, "vllm 1": 1.0}
    closed = scraped(tracker)
    assert of(closed, "whet_server_up") == {"vllm 0": 0.0, "vllm 1": 0.0}, "the engine was closed, and a scrape does no harm"


def test_servers_behind_a_router_are_named_one_by_one(tracker):
    with two_behind_a_router() as (servers, member):
        for server in servers:
            server.metrics = TEXT
        assert [server.name for server in member.servers] == ["vllm 0", "vllm 1"]
        pool = EnginePool([Slot("vllm router", None, member, breaker_of(PoolConfig()))], None, PoolConfig(), deterministic=False)
        tracker.source = PoolSource(pool)
        found = scraped(tracker)
    assert of(found, "vllm:prefix_cache_hits_total") == {"vllm 0": 5.0, "vllm 1": 5.0}
    assert of(found, "whet_engine_member_up") == {"vllm router": 1.0}


def test_a_server_without_the_route_is_up(tracker, tmp_path):
    """`whet serve` has none, and SGLang none without `enable_metrics`."""
    with live(model_folder(tmp_path / "model")) as server:
        member = ServerAt(Sglang(), "sglang 0", server.url, lambda tokens: "", None, 10.0)(threading.Event())
        pool = EnginePool([Slot("sglang 0", None, member, breaker_of(PoolConfig()))], None, PoolConfig(), deterministic=False)
        tracker.source = PoolSource(pool)
        found = scraped(tracker)
        member.stop()
    assert of(found, "whet_server_up") == {"sglang 0": 1.0} and not any(name.startswith("sglang") for name, *_ in found)
