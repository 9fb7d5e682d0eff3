"""A run's metrics over HTTP: the newest values, one scrape at a time, and nothing that a scrape does reaches the run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from whet.observe.exposition import gauge
from whet.observe.prometheus import PrometheusTracker, address_of
from whet.observe.trackers import ObserveConfig, ReplyTracker, build_trackers


@pytest.fixture
def tracker():
    with contextlib.closing(PrometheusTracker("127.0.0.1:0")) as made:
        yield made


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def samples(text):
    return {(s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_a_scrape_has_the_newest_value_of_each_metric(tracker):
    assert samples(get(tracker.url)[1]) == {}, "before the first step there is nothing"
    tracker.log(1, {"reward/total": 0.25, "run/version": 1.0, "policy/loss": math.nan})
    tracker.log(2, {"reward/total": 0.5, "run/version": 2.0, "eval/test/mean@4": math.inf})
    kind, text = get(tracker.url)
    found = samples(text)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert math.isnan(found.pop(("whet_policy_loss",))), "an older value stays until there is a newer one"
    assert found == {
        ("whet_step",): 2.0,
        ("whet_reward_total",): 0.5,
        ("whet_run_version",): 2.0,
        ("whet_eval_test_mean_4",): math.inf,
    }
    helps = {family.name: family.documentation for family in text_string_to_metric_families(text)}
    assert helps["whet_eval_test_mean_4"] == "eval/test/mean@4", "the name in docs/metrics.md"


def test_two_names_that_become_one_are_told_apart_by_a_label(tracker):
    tracker.log(1, {"mine/a_b": 1.0, "mine/a/b": 2.0})
    found = samples(get(tracker.url)[1])
    assert found[("whet_mine_a_b", "mine/a_b")] == 1.0 and found[("whet_mine_a_b", "mine/a/b")] == 2.0


class Source:
    """An engine whose servers answer what is planted."""

    def __init__(self, **texts):
        self.planted, self.num_asked, self.waits = texts, 0, None
        self.asked = threading.Event()

    def families(self):
        return [gauge("whet_engine_member_up", "", {(("member", name),): 1.0 for name in self.planted})]

    async def texts(self, timeout_s):
        self.num_asked += 1
        self.asked.set()
        if self.waits is not None:
            await asyncio.to_thread(self.waits.wait)
        if "raises" in self.planted:
            raise RuntimeError("planted")
        return self.planted


def test_servers_are_in_the_same_scrape_and_what_cannot_be_read_is_not_up(tracker):
    good = '# TYPE vllm:running gauge\nvllm:running{model="m"} 4\n'
    tracker.source = Source(one=good, two=good, silent=None, bare="", broken="<html>")
    found = samples(get(tracker.url)[1])
    assert [found[("whet_server_up", name)] for name in ("one", "two", "silent", "bare", "broken")] == [1, 1, 0, 1, 0]
    assert found[("vllm:running", "one", "m")] == found[("vllm:running", "two", "m")] == 4
    assert sum(name == "vllm:running" for name, *_ in found) == 2 and found[("whet_engine_member_up", "one")] == 1


def test_callers_that_come_together_share_a_scrape(tracker):
    source = tracker.source = Source(one="")
    source.waits = threading.Event()
    found = []
    callers = [threading.Thread(target=lambda: found.append(get(tracker.url)[1])) for _ in range(8)]
    for each in callers:
        each.start()
    assert source.asked.wait(20)
    tracker.log(3, {"a": 1.0})  # returns at once: nothing of the run waits for a scrape
    source.waits.set()
    for each in callers:
        each.join(20)
    assert len(found) == 8 and source.num_asked < 8


def test_a_scrape_that_fails_is_its_own_answer_and_the_next_may_succeed(tracker):
    tracker.log(1, {"a": 1.0})
    tracker.source = Source(raises="")
    with pytest.raises(urllib.error.HTTPError) as failed:
        get(tracker.url)
    assert failed.value.code == 500 and failed.value.read() == b"this scrape failed: RuntimeError: planted\n"
    tracker.source = None
    assert ("whet_a",) in samples(get(tracker.url)[1])


def test_a_name_that_leads_here_from_elsewhere_is_refused(tracker):
    assert get(tracker.url.replace("127.0.0.1", "localhost"))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(tracker.url, Host="evil.example:9400")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(tracker.url.replace("/metrics", "/"))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("0.0.0.0:9400", r"can be reached from other machines.*write 127\.0\.0\.1:9400"),
        ("192.168.0.1:9400", "can be reached from other machines"),
        ("somewhere:9400", "is no address of this machine"),
        ("9400", "is no address to listen at; write 127.0.0.1:9400"),
        ("127.0.0.1:", "is no address to listen at"),
        ("127.0.0.1:70000", "is no address to listen at"),
        (":9400", "is no address of this machine"),
    ],
)
def test_an_address_is_one_of_this_machine(address, words):
    with pytest.raises(ValueError, match=words):
        ObserveConfig(prometheus=address)


def test_addresses_of_this_machine():
    found = [address_of(each) for each in ("localhost:1", "127.0.0.2:0", "[::1]:9400")]
    assert found == [("localhost", 1), ("127.0.0.2", 0), ("::1", 9400)]


def test_a_port_that_is_taken_is_an_error_with_what_to_do(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"observe\.prometheus: cannot listen on 127\.0\.0\.1:{port}: .*choose another port"):
            build_trackers(ObserveConfig(prometheus=f"127.0.0.1:{port}"), tmp_path, {})


def test_it_is_the_last_tracker_and_ends_with_the_run(tmp_path):
    jsonl, tracker = build_trackers(ObserveConfig(prometheus="127.0.0.1:0"), tmp_path, {})
    assert isinstance(tracker, PrometheusTracker) and not isinstance(tracker, ReplyTracker)
    get(tracker.url)
    jsonl.close()
    tracker.close()
    tracker.close()
    assert not any(thread.name == "prometheus" for thread in threading.enumerate())
    with pytest.raises(urllib.error.URLError):
        get(tracker.url)
