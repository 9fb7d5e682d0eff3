"""A run that Prometheus scrapes while it trains: one page for the run, its engine's members and their servers."""

from __future__ import annotations

import json
import re
import threading
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.tiny_run import make_files, run_config
from tests.serve.serve_setup import live
from whet.loop import Observer
from whet.runs.commands import train

OBSERVE = {"prometheus": "127.0.0.1:0"}


@pytest.fixture
def scrapes(monkeypatch):
    """What a scrape after each step finds."""
    found, tell = [], Observer.tell

    def tell_and_scrape(self, step, values):
        tell(self, step, values)
        with urllib.request.urlopen(self.trackers[-1].url, timeout=20) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        found.append({(s.name, *s.labels.values()): s.value for family in families for s in family.samples})

    monkeypatch.setattr(Observer, "tell", tell_and_scrape)
    return found


def logged(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


def test_a_scrape_of_a_run_has_the_values_of_its_log(tmp_path, scrapes):
    make_files(tmp_path)
    train(run_config(tmp_path, "run", observe=OBSERVE, num_rollouts=2))
    for step, (found, row) in enumerate(zip(scrapes, logged(tmp_path / "run"), strict=True), start=1):
        assert found[("whet_step",)] == found[("whet_run_version",)] == step == row["run/version"]
        for name in ("reward/total", "policy/loss", "sync/proven_share", "mismatch/logprob_max", "tokens/sampled"):
            assert found[("whet_" + name.replace("/", "_"),)] == row[name]
        assert not any(name.startswith(("whet_engine_member", "whet_server")) for name, *_ in found), "the engine has no members"
    url = re.search(r"Prometheus reads this run's metrics at (http://127\.0\.0\.1:\d+/metrics)", (tmp_path / "run/log.txt").read_text())
    assert url is not None
    with pytest.raises(OSError):
        urllib.request.urlopen(url[1], timeout=5)
    assert not any(thread.name == "prometheus" for thread in threading.enumerate())


@pytest.mark.long
def test_a_scrape_of_a_run_on_servers_has_each_of_them(tmp_path, scrapes):
    make_files(tmp_path)
    with live(tmp_path / "model") as one, live(tmp_path / "model") as other:
        engine = {"name": "sglang", "urls": [one.url, other.url]}
        changes = {"deterministic": False, "engine": engine, "sync": {"transport": "disk"}, "observe": OBSERVE}
        train(run_config(tmp_path, "run", num_rollouts=2, **changes))
    for found in scrapes:
        for name in ("whet_engine_member_up", "whet_server_up"):
            assert [found[(name, server)] for server in ("sglang 0", "sglang 1")] == [1.0, 1.0]
        assert found[("whet_engine_members_up",)] == 2
    assert len(scrapes) == len(logged(tmp_path / "run")) == 2
