"""A run whose replies come from servers that speak SGLang's routes: two of `whet serve`."""

from __future__ import annotations

import json

import pytest

from tests.e2e.tiny_run import make_files, run_config
from tests.serve.serve_setup import live
from whet.observe.records import read_records
from whet.runs.commands import train


@pytest.mark.long
def test_a_run_trains_on_what_servers_of_sglangs_routes_sample(tmp_path):
    make_files(tmp_path)
    with live(tmp_path / "model") as one, live(tmp_path / "model") as other:
        engine = {"name": "sglang", "urls": [one.url, other.url]}
        train(run_config(tmp_path, "run", deterministic=False, engine=engine, sync={"transport": "disk"}))
        labels = [server.get("/model_info")[1]["weight_version"] for server in (one, other)]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "policy/loss" in row]
    assert len(updates) == 4 and labels == ["4", "4"]
    for row in updates:
        assert row["sync/probe_nats"] < 1e-4 and row["mismatch/logprob_max"] < 1e-4 and row["engine/members_up"] == 2
        assert row["rollout/tokens"] > 0 and row["outcome/failed"] == 0
        assert row["sync/proven_arrival"] == row["sync/proven_share"] == 0, "SGLang tells no digests"
    for row in read_records(tmp_path / "run/rollouts"):
        (proof,) = row["proofs"].values()
        assert row["proofs"].keys() == {v for v in row["versions"] if v >= 0} and (proof["arrival"], proof["memory_share"]) == (False, 0.0)
        assert 0 <= proof["probe_nats"] < 1e-4
