"""A run whose replies come from servers that speak SGLang's routes: two of `whet serve`."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.tiny_run import make_files, run_config
from tests.serve.serve_setup import live
from tests.serve.test_serve_shutdown import command
from whet.observe.records import read_records
from whet.runs.commands import train


@pytest.mark.long
def test_a_run_trains_on_what_servers_of_sglangs_routes_sample(tmp_path):
    make_files(tmp_path)
    with live(tmp_path / "model") as one, live(tmp_path / "model") as other:
        engine = {"name": "sglang", "urls": [one.url, other.url]}
        train(run_config(tmp_path, "run", deterministic=False, engine=engine, sync={"transport": "disk"}))
        labels = [server.get("/model_info")[1]["weight_version"] for server in (one, other)]
    assert labels == ["4", "4"]
    check_metrics(tmp_path / "run")


@pytest.mark.long
def test_a_run_trains_on_what_server_processes_sample_whose_weights_are_broadcast(tmp_path):
    make_files(tmp_path)
    with command(tmp_path / "model") as (_, one), command(tmp_path / "model") as (_, other):
        urls = [f"http://{one}", f"http://{other}"]
        engine = {"name": "sglang", "urls": urls}
        train(run_config(tmp_path, "run", deterministic=False, engine=engine, sync={"transport": "broadcast", "timeout_s": 60}))
        for url in urls:
            with urllib.request.urlopen(url + "/model_info", timeout=30) as answer:
                assert json.load(answer)["weight_version"] == "4"
    assert not (tmp_path / "run/sync").exists(), "no folder of weights"
    for row in check_metrics(tmp_path / "run"):
        assert row["sync/proven_share"] == 0.0 and row["sync/bytes"] > 0


def check_metrics(run_dir: Path):
    """Check that a run of four updates sampled from what it trained, and return their rows."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "policy/loss" in row]
    assert len(updates) == 4
    for row in updates:
        assert row["sync/probe_nats"] < 1e-4 and row["mismatch/logprob_max"] < 1e-4 and row["engine/members_up"] == 2
        assert row["rollout/tokens"] > 0 and row["outcome/failed"] == 0
        assert row["sync/proven_arrival"] == row["sync/proven_share"] == 0, "SGLang tells no digests"
    for row in read_records(run_dir / "rollouts"):
        (proof,) = row["proofs"].values()
        assert row["proofs"].keys() == {v for v in row["versions"] if v >= 0} and (proof["arrival"], proof["memory_share"]) == (False, 0.0)
        assert 0 <= proof["probe_nats"] < 1e-4
    return updates
