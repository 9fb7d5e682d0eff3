"""Runs whose records say, for each version that sampled a token, how far its weights were proven: also after a resume."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_stop import ask_at
from tests.e2e.tiny_run import checkpoints_of, make_files, run_config
from whet.engine.embedded.core import EngineCore
from whet.observe.records import read_records
from whet.runs.commands import evaluate, generate, train
from whet.stop import Stopped
from whet.types import Proof


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proofs")
    make_files(folder)
    return folder


def sets(folder):
    return {"before_training": True, "sets": {"test": {"path": str(folder / "train.jsonl"), "limit": 2}}}


def proofs_of(below):
    """The proofs of each row, and the versions that sampled its tokens."""
    rows = read_records(below / "rollouts")
    return [({v: Proof(**proof) for v, proof in row["proofs"].items()}, {v for v in row["versions"] if v >= 0}) for row in rows]


def test_a_run_in_one_process_has_the_proof_of_each_version_in_its_records_to_the_bit_after_a_resume(folder):
    for name, lengths in (("whole", (4,)), ("parts", (1, 3, 4))):
        for num_rollouts in lengths:
            train(run_config(folder, name, num_rollouts=num_rollouts, evaluate=sets(folder)))
    rows = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
    logged = {row["run/version"]: row for row in rows if "run/version" in row}
    assert all(row["sync/proven_arrival"] == row["sync/proven_share"] == 1 for row in logged.values())
    found = proofs_of(folder / "whole")
    assert [versions for _, versions in found] == [{i} for i in range(4) for _ in range(6)]
    for proofs, versions in found:
        ((version, proof),) = proofs.items()
        assert {version} == versions and (proof.arrival, proof.memory_share) == (True, 1.0)
        assert proof.probe_nats == logged[version]["sync/probe_nats"] if version else 0 <= proof.probe_nats < 1e-4
    assert proofs_of(folder / "parts") == found
    evaluated = proofs_of(folder / "whole/evaluations/test")
    assert evaluated[0] == ({0: found[0][0][0]}, {0}), "the version that the run begins with is proven, too"
    assert [versions for _, versions in evaluated] == [{0}, {0}, {4}, {4}] and evaluated[3][0][4].probe_nats == logged[4]["sync/probe_nats"]


def test_half_finished_replies_have_the_proofs_of_all_their_tokens(folder, monkeypatch, stop):
    rollout = {"max_turn_tokens": 40, "max_tokens": 160}
    config = run_config(folder, "half", deterministic=False, control={"max_staleness": 2}, rollout=rollout)
    with monkeypatch.context() as patch:
        ask_at(patch, EngineCore, "step", stop, 20)  # in the middle of the first turns
        with pytest.raises(Stopped):
            train(config)
    newest = folder / "half/checkpoints" / checkpoints_of(folder / "half")[-1]
    kept = json.loads((newest / "state.json").read_text())["others"]["proofs"]
    assert kept.keys() == {"0"} and kept["0"]["memory_share"] == 1
    stop._number = None
    train(config)
    found = proofs_of(folder / "half")
    assert len(found) == 24 and all(proofs.keys() == versions for proofs, versions in found)
    first = [proofs[0] for proofs, _ in found if 0 in proofs]
    assert first and all(proof == Proof(**kept["0"]) for proof in first)


def test_a_model_that_nobody_published_has_no_proof(folder):
    assert generate(run_config(folder, "none"), folder / "generated", 2) == 6
    evaluate(run_config(folder, "bare", evaluate=sets(folder)), base=True)
    for below in (folder / "generated", folder / "bare/evaluate_1/evaluations/test"):
        assert {version for _, versions in proofs_of(below) for version in versions} == {0}
        assert all(proofs == {0: Proof()} for proofs, _ in proofs_of(below))
    assert Proof().words() == "no proof"
