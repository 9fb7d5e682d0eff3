"""Servers that play with a model which no run trains: evaluations, replies, and a policy with a loop of the caller's. They begin with other
weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import whet
from tests.api.small import score
from tests.e2e.tiny_run import QUESTIONS, make_files, run_config
from tests.serve.serve_setup import live, model_folder
from whet.build.parts import removed_after
from whet.engine.publish import EnginePublisher
from whet.observe.records import read_records
from whet.runfolder.lock import claim
from whet.runs.commands import evaluate, generate, train
from whet.types import Proof


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of another model of the same shape."""
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    shutil.rmtree(tmp_path / "model")
    for seed, name in enumerate(("model", "other")):
        model_folder(tmp_path / name, seed)
    with live(tmp_path / "other") as server:
        yield server


def servers(server):
    return {"name": "sglang", "urls": [server.url]}


def greedy(played):
    return [trajectory.turns[0].tokens.tolist() for trajectory in played]


def test_replies_are_of_the_model_that_the_call_names_and_nothing_is_left(server, tmp_path):
    how = {"rollout": {"max_turn_tokens": 12, "max_tokens": 200, "temperature": 0}}
    found = whet.generate("model", QUESTIONS, engine=servers(server), **how)
    assert greedy(found) == greedy(whet.generate("model", QUESTIONS, **how)) != greedy(whet.generate("other", QUESTIONS, **how))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other", "train.jsonl"]


def measured(config, **changes):
    """Tokens that an evaluation played, proofs of their weights, and its folder."""
    before = set(Path(config.run_dir).glob("evaluate_*"))
    evaluate(config.model_copy(update=changes))
    (folder,) = set(Path(config.run_dir).glob("evaluate_*")) - before
    rows = read_records(folder / "evaluations/again/rollouts")
    return [row["tokens"] for row in rows], [row["proofs"] for row in rows], folder


@pytest.mark.parametrize("lora", [False, True])
def test_an_evaluation_is_of_what_the_run_has_trained(server, tmp_path, lora):
    sets = {"again": {"path": str(tmp_path / "train.jsonl"), "rollout": {"temperature": 0}}}
    adapter = {"lora": {"rank": 4}} if lora else {}
    config = run_config(tmp_path, "run", num_rollouts=2, evaluate={"sets": sets}, train={"optim": {"lr": 5e-2}, **adapter})
    train(config)
    tokens, _, _ = measured(config)
    of_servers = run_config(tmp_path, "run", evaluate={"sets": sets}, deterministic=False, train=adapter, engine=servers(server))
    found, proofs, folder = measured(of_servers)
    assert found == tokens
    assert all(0 <= proof["0"]["probe_nats"] < 1e-4 for proof in ({str(v): p for v, p in one.items()} for one in proofs))
    assert not (folder / "sync").exists() and not (tmp_path / "run/sync").exists()
    with claim(tmp_path / "run", "whet train"), pytest.raises(ValueError, match=r"engine\.urls: process \d+ on .* works in .*/run,"):
        evaluate(of_servers)


def test_rollouts_of_servers_are_recorded_with_the_proof_of_their_weights(server, tmp_path):
    config = run_config(tmp_path, "run", deterministic=False, engine=servers(server))
    mine = tmp_path / "out/sync/notes"
    mine.mkdir(parents=True)
    assert generate(config, tmp_path / "out", 2) == 6
    assert all(proof["probe_nats"] < 1e-4 for row in read_records(tmp_path / "out/rollouts") for proof in row["proofs"].values())
    assert mine.exists() and not (tmp_path / "run").exists() and len(list((tmp_path / "out").glob("sync*"))) == 1


def test_the_proof_is_that_of_the_time_when_replies_were_played(server, tmp_path, monkeypatch):
    config = run_config(tmp_path, "run", deterministic=False, engine=servers(server))
    at_first = EnginePublisher.proofs
    later = property(lambda self: {version: proof.through(Proof(probe_nats=0.5)) for version, proof in at_first.fget(self).items()})
    monkeypatch.setattr(EnginePublisher, "proofs", later)  # as of a server that was started again after the publication
    generate(config, tmp_path / "out", 1)
    assert all(proof["probe_nats"] >= 0.5 for row in read_records(tmp_path / "out/rollouts") for proof in row["proofs"].values())


def test_servers_of_a_run_get_no_weights_of_a_command_and_its_versions_stay(server, tmp_path):
    shared = tmp_path / "shared/version_000007"
    shared.mkdir(parents=True)
    config = run_config(tmp_path, "run", deterministic=False, engine=servers(server), sync={"transport": "disk", "folder": "shared"})
    with claim(tmp_path / "run", "whet train"), pytest.raises(ValueError, match=r"works in .*/run, and this command would load other"):
        generate(config, tmp_path / "out", 2)
    assert generate(config, tmp_path / "out", 2) == 6
    assert list((tmp_path / "shared").iterdir()) == [shared]


def test_a_policy_of_servers_samples_with_the_weights_of_its_last_step(server, tmp_path):
    settings = {"rollout": {"max_turn_tokens": 12, "max_tokens": 200}, "train__optim__lr": 1e-1, "run_dir": "policy"}
    with whet.Policy("model", reward=score, engine=servers(server), **settings) as policy:
        for version in range(3):
            groups = policy.sample(QUESTIONS, samples=4)
            assert {set(t.turns[0].versions) == {version} for group in groups for t in group.trajectories} == {True}
            batch = whet.batch_of(groups)
            passed = policy.forward_backward(batch)
            trained = batch.loss_mask & (passed.logprobs != 0)
            assert (passed.logprobs - batch.rollout_logprobs)[trained].abs().max() < 1e-4, "servers sample from what trains"
            policy.optim_step()
    assert server.get("/model_info")[1]["weight_version"] == "2" and not (tmp_path / "policy").exists()


def test_a_run_on_servers_replies_by_the_embedded_engine(server, tmp_path):
    train(run_config(tmp_path, "run", deterministic=False, num_rollouts=1, engine=servers(server)))
    label = server.get("/model_info")[1]["weight_version"]
    run = whet.Run("run")
    try:
        assert isinstance(run.generate(QUESTIONS[0], max_turn_tokens=4), str)
    finally:
        run.close()
    assert server.get("/model_info")[1]["weight_version"] == label


@pytest.mark.parametrize("kept", [False, True])
def test_a_folder_goes_with_what_was_made_for_it(tmp_path, kept):
    folder = tmp_path / "a/b/sync"
    with pytest.raises(RuntimeError), removed_after(folder):
        (folder / "version").mkdir(parents=True)
        if kept:
            (tmp_path / "a/log").write_text("")
        raise RuntimeError
    assert not (tmp_path / "a/b").exists() and (tmp_path / "a").exists() == kept
