"""`whet plan`, and meshes in `whet check`."""

from __future__ import annotations

import json

import pytest
from small_run import look, of
from typer.testing import CliRunner

from whet.cli import app
from whet.config import load_config
from whet.job import with_degrees
from whet.preflight.auto import auto_degrees
from whet.preflight.plan import parse_degrees
from whet.settings import RunConfig
from whet.train.torch_native.mesh import ParallelConfig

AREAS = ("batch", "algorithm", "device", "model", "memory")


def run(*args):
    return CliRunner().invoke(app, ["plan", *args])


def test_the_command_lists_layouts_and_chooses_one(here):
    done = run("model", "--devices", "4", "--memory", "1", "--longest", "64", "--budget", "128", "--json", "plan.json")
    assert done.exit_code == 0, done.output
    assert "Qwen3ForCausalLM" in done.output and "chosen: replicate 4" in done.output and "does not fit" not in done.output
    found = json.loads((here / "plan.json").read_text())
    assert found["chosen"]["replicate"] == 4
    assert all(layout["peak_bytes"] > 0 and layout["memory_bytes"]["parameters"] > 0 for layout in found["layouts"])


def test_what_does_not_fit_is_told_with_what_to_change(here):
    done = run("model", "--devices", "2", "--memory", "0.0001", "--longest", "64", "--budget", "128")
    assert done.exit_code == 2
    assert "nothing fits 2 devices of 104.9 KiB" in done.output and "lower train.max_tokens_per_device" in done.output


def test_one_layout_may_be_asked_for(here):
    done = run("model", "--devices", "2", "--degrees", "context=2", "--longest", "64", "--budget", "128")
    assert done.exit_code == 0 and "chosen: context 2" in done.output
    wrong = run("model", "--devices", "4", "--degrees", "context=2")
    assert wrong.exit_code == 2
    with pytest.raises(ValueError, match="write for example shard=8,tensor=2"):
        parse_degrees("shards=2")


def test_a_mesh_is_planned_from_a_runs_file(here):
    whole, _ = look(*AREAS, overrides=["algo.grpo.kl_coef=0.1"])
    halved, scene = look(*AREAS, overrides=["algo.grpo.kl_coef=0.1", "train.parallel.shard=2"])
    assert "shard 2, planned for the first of 2 processes" in of(halved, "memory", "ok")[0]
    assert of(whole, "memory", "ok")
    weights = sum(p.nbytes for _, p in scene.model.named_weights())
    assert scene.memory.bytes_of("parameters") == pytest.approx(weights / 2, rel=0.01)
    assert scene.memory.bytes_of("reference model") == pytest.approx(weights / 2, rel=0.01)
    assert scene.memory.bytes_of("engine weights") == weights, "the first process holds the engine's"


def test_a_critic_is_shared_out_too(here):
    _, alone = look(*AREAS, overrides=["algo.name=ppo"])
    _, scene = look(*AREAS, overrides=["algo.name=ppo", "train.parallel.shard=2"])
    for part in ("critic's parameters", "critic's masters and moments"):
        assert scene.memory.bytes_of(part) == pytest.approx(alone.memory.bytes_of(part) / 2, rel=0.01)


def test_auto_is_settled_by_memory(here, monkeypatch):
    config = load_config(RunConfig, here / "run.toml", ["train.parallel=auto"])
    chosen = auto_degrees(config, 2, 2)
    assert chosen.degrees == ParallelConfig(replicate=2)
    assert "auto chose replicate 2" in chosen.notes[0] and "memory:" in chosen.notes[1] and "exchanges:" in chosen.notes[2]
    assert with_degrees(config, chosen.degrees).train.degrees == chosen.degrees
    monkeypatch.setattr("whet.preflight.auto.device_memory", lambda _: (2**20, "memory"))
    with pytest.raises(ValueError, match="nothing fits 2 devices"):
        auto_degrees(config, 2, 2)
    (note,) = of(look(*AREAS, overrides=["train.parallel=auto"])[0], "memory", "skip")
    assert "whet plan" in note


def test_an_optimizer_elsewhere_leaves_room(here):
    ways = ([], ["--offload"])
    plans = []
    for i, more in enumerate(ways):
        done = run("model", "--devices", "2", "--degrees", "shard=2", "--longest", "64", "--budget", "64", "--json", f"{i}.json", *more)
        assert done.exit_code == 0, done.output
        plans.append(json.loads((here / f"{i}.json").read_text())["layouts"][0]["memory_bytes"])
    assert plans[0].keys() - plans[1].keys() == {"parameters", "optimizer moments", "optimizer scratch"}
    assert plans[1]["gradients"] < plans[0]["gradients"]


def test_muon_puts_a_matrix_together_on_a_mesh(here):
    """With what its iteration takes, as one process plans it for a matrix."""
    _, alone = look(*AREAS, overrides=["train.optim.name=muon"])
    _, scene = look(*AREAS, overrides=["train.optim.name=muon", "train.parallel.shard=2"])
    assert alone.memory.bytes_of("a matrix put together") == 0
    largest = 48 * 32  # entries of gate, up or down
    assert 4 * largest < scene.memory.bytes_of("a matrix put together") <= alone.memory.bytes_of("optimizer scratch")
