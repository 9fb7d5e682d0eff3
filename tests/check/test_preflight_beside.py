"""What `whet check` says of the models beside the policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.check.real_memory import Alive
from tests.check.small_run import ROWS, SHAPE, look, of
from tests.conftest import needs_cut_layers
from whet.check.budget import workload
from whet.check.models import auxiliary_parts
from whet.check.saved import checkpoint_sizes
from whet.data.template import load_tokenizer
from whet.model.attention import PackedRow
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.scalar import load_scalar
from whet.plan.memory import checkpoint_bytes
from whet.plan.text import bytes_text
from whet.quickstart.model import make_model
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig

pytestmark = pytest.mark.long

AREAS = ("batch", "algorithm", "model", "data", "tokenizer", "evaluation", "memory", "disk")
CONFIG = ModelConfig(path="model", device="cpu")


UNEVEN = {"context": 4, "context_attention": "ulysses"}
"""Of two heads."""


def size_of(folder):
    return sum(tensor.nbytes for path in folder.rglob("*.safetensors") for tensor in load_file(path).values())


def test_a_critic_is_in_the_memory_plan_and_in_the_checkpoints(here):
    _, plain = look(*AREAS, overrides=["algo.name=rloo"])
    findings, context = look(*AREAS, overrides=["algo.name=ppo"])
    assert not [f for f in findings if f.status == "FAIL"]
    assert any(text.startswith("critic: Qwen3ForSequenceClassification, ") for text in of(findings, "model", "ok"))
    critic = load_scalar(here / "model", CONFIG, trainable=True, new_head="zeros")
    weights = sum(w.nbytes for _, w in critic.named_weights())
    plan = context.memory
    assert plan.bytes_of("critic's parameters") == plan.bytes_of("critic's gradients") == weights
    assert plan.bytes_of("critic's masters and moments") == 2 * weights
    assert plan.at("critic") > plain.memory.at("critic") + 4 * weights
    for phase in ("rollout", "step"):
        assert plan.at(phase) == plain.memory.at(phase) + 3 * weights


def test_models_are_planned_in_the_layouts_of_their_own(here):
    spread = ["algo.name=ppo", "algo.kl_coef=0.1", "train.parallel.shard=2"]
    _, alike = look(*AREAS, overrides=spread)
    _, apart = look(*AREAS, overrides=[*spread, "critic.parallel.replicate=2", "reference.parallel.replicate=2"])
    models = apart.auxiliary.critic, apart.auxiliary.frozen["reference"]
    critic, reference = (sum(w.nbytes for _, w in model.named_weights()) for model in models)
    assert apart.memory.bytes_of("critic's parameters") == critic and apart.memory.bytes_of("reference model") == reference
    for part, whole in (("critic's parameters", critic), ("reference model", reference)):
        assert whole / 2 <= alike.memory.bytes_of(part) < 0.6 * whole
    findings, _ = look(*AREAS, overrides=[*spread, "critic.parallel.shard=4"])
    assert any("critic.parallel asks for 4 processes" in f.text for f in findings if f.status == "FAIL")


@needs_cut_layers
def test_a_critic_on_a_mesh_holds_its_share_of_activations_and_the_layers_put_together(here):
    make_model(here / "wide", [row["prompt"] for row in ROWS] * 2, SHAPE.model_copy(update={"num_heads": 2, "num_kv_heads": 2}), seed=0)
    larger = ["model.path=wide", "algo.name=ppo", "train.max_tokens_per_device=2048", "rollout.max_tokens=1024"]

    def worst(*degrees):
        return look(*AREAS, overrides=[*larger, *degrees])[1].memory.bytes_of("critic's step or activations")

    alone, shared, cut = worst(), worst("train.parallel.shard=2"), worst("train.parallel.shard=2", "critic.parallel.tensor=2")
    assert alone < shared < 1.05 * alone and cut < 0.75 * shared


def test_degrees_of_a_models_own_that_it_cannot_be_cut_by_are_refused_by_their_key(here):
    spread = ["algo.name=ppo", "algo.kl_coef=0.1", "train.parallel.shard=2"]
    for name in ("critic", "reference"):
        for degrees, words in ({"tensor": 2}, "cannot share"), ({"shard": 2, "expert": 2}, "has no plan"), (UNEVEN, "Ulysses cannot share"):
            own = [f"{name}.parallel.{key}={value}" for key, value in degrees.items()]
            whole = [*spread, "train.parallel.shard=4"] if degrees is UNEVEN else spread
            findings, _ = look(*AREAS, overrides=[*whole, *own])
            (fault,) = [f.text for f in findings if f.status == "FAIL" and f.area == "memory"]
            assert fault.startswith(f"{name}: {name}.parallel: ") and words in fault, fault
    (fault,) = of(look(*AREAS, overrides=[f"train.parallel.{key}={value}" for key, value in UNEVEN.items()])[0], "memory", "FAIL")
    assert fault.startswith("the policy: train.parallel: context is 4, but each rank has 2 heads")


def test_what_a_mesh_offloads_is_planned_while_it_is_computed_with(here):
    """As of a device whose memory is another one than the machine's."""
    more = ["algo.name=ppo", "algo.kl_coef=0.1", "reference.path=model", "train.parallel.shard=2", "train.offload=true"]
    _, context = look(*AREAS, overrides=more)
    work = workload(context)
    plans = (auxiliary_parts(context.auxiliary, context.rl, each) for each in (work, replace(work, offloaded=True)))
    kept, gone = ({part.name: part.size_bytes for part in plan} for plan in plans)
    assert kept["reference model"] and not gone["reference model"]
    assert kept["critic's parameters"] and kept["critic's masters and moments"]
    assert not gone["critic's parameters"] and not gone["critic's masters and moments"]
    assert 0 < gone["critic's gradients"] < kept["critic's gradients"]
    layers = context.model.hf.model.layers
    rest = sum(p.nbytes for p in context.model.hf.parameters()) - sum(p.nbytes for p in layers.parameters())
    assert gone["reference's layers put together"] == rest + 2 * sum(p.nbytes for p in layers[0].parameters())
    assert kept["reference's layers put together"] == gone["reference's layers put together"]


def test_the_disk_plan_of_a_checkpoint_is_what_a_critic_and_a_refreshed_reference_write(here):
    _, context = look(*AREAS, overrides=["algo.name=ppo", "algo.kl_coef=0.1", "reference.refresh_every=2"])
    critic = TorchBackend(load_scalar(here / "model", CONFIG, trainable=True, new_head="zeros"), TrainConfig(), 2)
    for p in critic.model.hf.parameters():
        p.sum().backward()
    critic.optim_step()
    critic.save(here / "saved/critic")
    TorchBackend(load_causal(here / "model", CONFIG, trainable=False), TrainConfig(), None).save(here / "saved/reference")
    sizes = checkpoint_sizes(context, context.model, spread=False)
    assert (sizes["critic"], sizes["reference"]) == (size_of(here / "saved/critic"), size_of(here / "saved/reference"))


@pytest.mark.parametrize(
    "settings",
    [[], ["reference.parallel.replicate=1"], ["train.lora.rank=4"], ["checkpoint.restore.parts=['data']"]],
    ids=str,
)
def test_the_disk_plan_has_the_reference_of_a_run_that_begins_with_restored_weights(here, settings):
    begins = ["algo.kl_coef=0.1", "checkpoint.restore.path=other", *settings]
    findings, context = look(*AREAS, overrides=begins)
    weights = sum(w.nbytes for _, w in context.model.named_weights()) if not settings or "parallel" in settings[0] else 0
    whole = checkpoint_bytes(context.model, context.config.train) + weights
    assert sum(checkpoint_sizes(context, context.model, spread=False).values()) == whole
    one = bytes_text(whole)
    assert any(f"checkpoints of {one} (" in text for text in of(findings, "disk")), of(findings, "disk")


def test_a_teacher_and_a_reference_of_their_own_are_parts_of_the_plan(here):
    overrides = ["algo.distill_coef=0.5", "teacher.path=model", "algo.kl_coef=0.1", "reference.path=model"]
    findings, context = look(*AREAS, overrides=overrides)
    assert not [f for f in findings if f.status == "FAIL"]
    weights = context.memory.bytes_of("parameters")
    assert context.memory.bytes_of("teacher model") == context.memory.bytes_of("reference model") == weights > 0


def test_a_reward_model_is_looked_at_loaded_and_counted(here):
    critic = load_scalar(here / "model", CONFIG, trainable=False, new_head="normal")
    critic.hf.save_pretrained(here / "scores")
    load_tokenizer(here / "model").save_pretrained(here / "scores")
    overrides = ["reward.name=model", "reward.options.path=scores", "reward.options.device=cpu"]
    findings, context = look(*AREAS, "reward", overrides=overrides)
    assert not [f for f in findings if f.status == "FAIL"]
    assert any(text.startswith("reward: Qwen3ForSequenceClassification, ") for text in of(findings, "model", "ok"))
    weights = sum(w.nbytes for _, w in critic.named_weights())
    assert context.memory.bytes_of("reward model") == weights
    plain, scores = look(*AREAS)[1].memory, context.memory.bytes_of("reward scores")
    assert scores > 0 and context.memory.at("rollout") == plain.at("rollout") + weights + scores
    assert context.memory.at("step") == plain.at("step") + weights, "it scores while the engine runs"
    fails = of(look(*AREAS, "reward", overrides=["reward.name=model", "reward.options.path=model"])[0], "reward", "FAIL")
    assert fails and all("is a language model" in text for text in fails)


def test_a_reward_model_that_is_spread_is_shared_out_and_there_once(here):
    load_scalar(here / "model", CONFIG, trainable=False, new_head="normal").hf.save_pretrained(here / "scores")
    load_tokenizer(here / "model").save_pretrained(here / "scores")
    table = 'reward={name="model", options={path="scores", spread=true}}'
    overrides = [table, f"evaluate.sets.test.{table}", "train.parallel.shard=2"]
    _, context = look(*AREAS, overrides=overrides)
    _, whole = look(*AREAS, overrides=[text.replace("spread=true", "spread=false") for text in overrides])
    assert context.memory.bytes_of("reward model") == pytest.approx(whole.memory.bytes_of("reward model") / 2, rel=0.01)
    assert whole.memory.bytes_of("reward 2 model") > 0 == context.memory.bytes_of("reward 2 model")


@pytest.mark.parametrize(
    ("batch_tokens", "deterministic", "lengths"), [(8192, False, [96] * 8), (200, False, [96, 96, 8]), (200, True, [96])]
)
def test_what_a_reward_model_takes_to_score_a_row_is_what_is_planned(here, batch_tokens, deterministic, lengths):
    """Eight trajectories of 96 tokens wait at most. In deterministic mode each is scored alone."""
    load_scalar(here / "model", CONFIG, trainable=False, new_head="normal").hf.save_pretrained(here / "scores")
    load_tokenizer(here / "model").save_pretrained(here / "scores")
    options = {"path": "scores", "device": "cpu", "batch_tokens": batch_tokens}
    overrides = ["reward.name=model", *(f"reward.options.{key}={value}" for key, value in options.items())]
    _, context = look(*AREAS, overrides=[*overrides, f"deterministic={str(deterministic).lower()}"])
    model = load_scalar(here / "scores", CONFIG, trainable=False)
    with torch.no_grad(), Alive().ignore(p for _, p in model.named_weights()) as alive:
        row = PackedRow(lengths, model.device)
        model.hidden(torch.zeros(sum(lengths), dtype=torch.int64), row.positions, row)
    assert context.memory.bytes_of("reward scores") == pytest.approx(alive.peak, rel=0.15)


def test_models_that_cannot_be_had_fail(here):
    make_model(here / "foreign", ["Wholly different words, zebra quartz!"] * 2, SHAPE, 0)
    for overrides, words in (
        (["algo.name=ppo", "critic.path=foreign"], "critic.path: the tokenizer of foreign is not the policy's"),
        (["algo.distill_coef=1", "teacher.path=foreign"], "teacher.path: the tokenizer of foreign is not the policy's"),
        (["algo.kl_coef=1", "reference.path=foreign"], "reference.path: the tokenizer of foreign is not the policy's"),
    ):
        fails = of(look(*AREAS, overrides=overrides)[0], "model", "FAIL")
        assert len(fails) == 1 and words in fails[0]
