"""`whet plan`, and meshes in `whet check`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tests.check.small_run import ROWS, SHAPE, look, of
from tests.conftest import needs_cut_layers
from whet.check.auto import auto_degrees, with_degrees
from whet.cli import app
from whet.config import load_config
from whet.plan.plan import parse_degrees
from whet.quickstart.model import make_model
from whet.settings.rl import RunConfig
from whet.settings.supervised import SupervisedRunConfig
from whet.train.torch_native.config import ParallelConfig

pytestmark = pytest.mark.long

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
    whole, _ = look(*AREAS, overrides=["algo.kl_coef=0.1"])
    halved, context = look(*AREAS, overrides=["algo.kl_coef=0.1", "train.parallel.shard=2"])
    assert "shard 2, planned for the first of 2 processes" in of(halved, "memory", "ok")[0]
    assert of(whole, "memory", "ok")
    weights = sum(p.nbytes for _, p in context.model.named_weights())
    assert context.memory.bytes_of("parameters") == pytest.approx(weights / 2, rel=0.01)
    assert context.memory.bytes_of("reference model") == pytest.approx(weights / 2, rel=0.01)
    assert context.memory.bytes_of("engine weights") == weights, "the first process holds the engine's"


def test_a_critic_is_shared_out_too(here):
    _, alone = look(*AREAS, overrides=["algo.name=ppo"])
    _, context = look(*AREAS, overrides=["algo.name=ppo", "train.parallel.shard=2"])
    for part in ("critic's parameters", "critic's masters and moments"):
        assert context.memory.bytes_of(part) == pytest.approx(alone.memory.bytes_of(part) / 2, rel=0.01)


def test_auto_is_settled_by_memory(here, monkeypatch):
    config = load_config(RunConfig, here / "run.toml", ["train.parallel=auto"])
    chosen = auto_degrees(config, 2, 2)
    assert chosen.degrees == ParallelConfig(replicate=2)
    assert "auto chose replicate 2" in chosen.notes[0] and "memory:" in chosen.notes[1] and "exchanges:" in chosen.notes[2]
    assert with_degrees(config, chosen.degrees).train.degrees == chosen.degrees
    monkeypatch.setattr("whet.check.auto.device_memory", lambda _: (2**20, "memory"))
    with pytest.raises(ValueError, match="nothing fits 2 devices"):
        auto_degrees(config, 2, 2)
    (note,) = of(look(*AREAS, overrides=["train.parallel=auto"])[0], "memory", "skip")
    assert "whet plan" in note


def judged(config, degrees):
    """What `whet check` plans with the degrees."""
    overrides = [f"train.parallel.{name}={value}" for name, value in degrees.model_dump(exclude_defaults=True).items()]
    return look(*AREAS, overrides=[*config, *overrides])[1].memory


def settled(here, monkeypatch, count, *overrides, memory=2**40, kind=RunConfig, file="run.toml"):
    """The degrees that are chosen for so many devices with so much memory each."""
    monkeypatch.setattr("whet.check.auto.device_memory", lambda _: (memory * count, "memory"))
    return auto_degrees(load_config(kind, here / file, ["train.parallel=auto", *overrides]), count, count).degrees


def test_auto_counts_the_models_beside_the_policy(here, monkeypatch):
    """Of a memory that has room for copies of the policy, but not of policy, critic and reference, shards are made."""
    more = ["algo.name=ppo", "algo.kl_coef=0.1", "reference.path=model"]
    whole = judged(more, ParallelConfig(replicate=2))
    assert whole.bytes_of("critic's parameters") and whole.bytes_of("reference model")
    room = int(whole.peak_bytes / 0.9)
    assert settled(here, monkeypatch, 2, *more, memory=room + 2) == ParallelConfig(replicate=2)
    chosen = settled(here, monkeypatch, 2, *more, memory=room - 2**10)
    assert chosen != ParallelConfig(replicate=2) and judged(more, chosen).peak_bytes < whole.peak_bytes
    assert settled(here, monkeypatch, 2, memory=room - 2**10) == ParallelConfig(replicate=2), "the policy alone has room"


def test_auto_counts_the_copy_of_a_checkpoint_that_is_written_beside_computation(here, monkeypatch):
    more = ["algo.name=ppo", "checkpoint.async_save=true"]
    whole = judged(more, ParallelConfig(replicate=2))
    assert whole.bytes_of("copy of a checkpoint")
    room = int(whole.peak_bytes / 0.9)
    assert settled(here, monkeypatch, 2, *more, memory=room + 2) == ParallelConfig(replicate=2)
    assert settled(here, monkeypatch, 2, *more, memory=room - 2**10) != ParallelConfig(replicate=2)
    assert settled(here, monkeypatch, 2, more[0], memory=room - 2**10) == ParallelConfig(replicate=2), "without the copy there is room"


@pytest.fixture
def few_samples(here):
    """A step of one sample, whose two devices must share it, and models of two heads, or of three, of keys and values, too."""
    for name, heads in (("wide", 2), ("odd", 3)):
        shape = SHAPE.model_copy(update={"num_heads": heads, "num_kv_heads": heads})
        make_model(here / name, [row["prompt"] for row in ROWS] * 2, shape, seed=0)
    return ["model.path=wide", "batch.prompts_per_rollout=1", "batch.samples_per_prompt=1", "algo.name=ppo"]


@needs_cut_layers
def test_auto_leaves_out_what_the_run_cannot_do(here, few_samples, monkeypatch):
    def names(*more):
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr("whet.check.auto.choose", lambda found, _: seen.extend(found) or found[0])
            settled(here, monkeypatch, 2, *few_samples, *more)
        return {layout.name for layout in seen}

    assert names() == {"tensor 2", "context 2"}
    assert names("train.compile=true") == {"context 2"}, "tensor is not compiled"
    assert names("critic.path=odd") == {"context 2"}, "the critic's heads do not divide"
    assert names("critic.path=odd", "critic.parallel.replicate=2") == {"tensor 2", "context 2"}, "it has degrees of its own"
    assert names("critic.path=odd", "train.rows=chains") == {"context 2"}
    with pytest.raises(ValueError, match="2 devices cannot share this model"):
        settled(here, monkeypatch, 2, *few_samples, "critic.path=odd", "train.rows=forest")


def test_auto_refuses_degrees_of_a_models_own_that_no_layout_helps(here, few_samples, monkeypatch):
    with pytest.raises(ValueError, match=r"critic.parallel asks for 4 processes .* the policy has 2"):
        settled(here, monkeypatch, 2, *few_samples, "critic.parallel.shard=4")
    with pytest.raises(ValueError, match=r"critic: critic\.parallel: .* has num_attention_heads=3, which 2 ranks cannot share"):
        settled(here, monkeypatch, 2, *few_samples, "critic.path=odd", "critic.parallel.tensor=2")
    with pytest.raises(ValueError, match=r"nothing fits 2 devices .* Without train.compile, layouts with tensor and expert are looked at"):
        settled(here, monkeypatch, 2, *few_samples, "train.compile=true", memory=2**10)


def test_auto_is_for_supervised_runs_too(here, monkeypatch):
    assert settled(here, monkeypatch, 2, kind=SupervisedRunConfig, file="sft.toml") == ParallelConfig(replicate=2)


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
    _, context = look(*AREAS, overrides=["train.optim.name=muon", "train.parallel.shard=2"])
    assert alone.memory.bytes_of("a matrix put together") == 0
    largest = 48 * 32  # entries of gate, up or down
    assert 4 * largest < context.memory.bytes_of("a matrix put together") <= alone.memory.bytes_of("optimizer scratch")
