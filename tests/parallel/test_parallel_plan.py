"""Plans of meshes against meshes: what a rank keeps, and what it sends."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config

from tests.parallel.ranks import in_fake_world, on_ranks
from tests.parallel.sent import SentBytes
from tests.parallel.test_parallel_layouts import LAYOUTS, layout
from tests.parallel.test_parallel_layouts import model_of as wide_model
from tests.parallel.tiny_models import CONFIGS, SIZES, backend_of, model_of
from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import REDUCERS
from whet.model.config import LoraConfig, ModelConfig
from whet.model.lora import add_adapter
from whet.model.meta import meta_causal
from whet.plan.layouts import DeviceSet, StepSizes, choose, degrees_for, layouts, reasons
from whet.plan.memory import Workload, checkpoint_bytes
from whet.plan.mesh_memory import MeshPlanner, check_spread, local_tensors
from whet.plan.traffic import Passes, flows_of, groups_of
from whet.train.torch_native.config import ParallelConfig, TrainConfig
from whet.types import Origin, Sample

pytestmark = pytest.mark.long

CONFIG = ModelConfig(path="tiny", device="cpu")
LENGTH = 32
LORA = LoraConfig(rank=4)


def meta(kind):
    return meta_causal(CONFIGS[kind](), CONFIG)


@pytest.mark.parametrize("degrees", [ParallelConfig(**each) for each in LAYOUTS])
def test_what_a_rank_keeps_is_planned(degrees):
    held, _ = in_fake_world(degrees.num_ranks, 0, layout, degrees)
    planned = local_tensors(wide_model(degrees), degrees, torch.float32)
    assert {name: p.numel() for name, p in planned.items()} == {name: count for name, (_, count, *_) in held.items()}


def held_by_optimizer(kind, degrees, lora=None):
    """Bytes of parameters, gradients and moments on a rank."""
    backend = backend_of(model_of(kind), degrees, lora=lora)
    batch = one_row()
    backend.forward_backward(batch, sft_loss)
    params = list(backend.model.hf.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in params]
    trained = [p.grad for p in params if p.requires_grad]
    grads = sum((grad.to_local() if isinstance(grad, DTensor) else grad).nbytes for grad in trained)
    backend.optim_step()
    moments = [t for name, t in backend.optimizer.tensors().items() if name.startswith("exp_avg")]
    return sum(p.nbytes for p in local), grads, sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in moments)


@pytest.mark.parametrize(
    ("kind", "degrees", "lora"),
    [
        ("dense", {"shard": 2}, None),
        ("tied", {"tensor": 2}, None),
        ("tied", {"tensor": 2}, LORA),
        pytest.param("moe", {"shard": 2, "tensor": 2, "expert": 4}, None, marks=pytest.mark.slow),
    ],
)
def test_parameters_gradients_and_moments_of_a_rank_are_planned(kind, degrees, lora):
    degrees = ParallelConfig(**degrees)
    found = on_ranks(degrees.num_ranks, held_by_optimizer, kind, degrees, lora)[0]
    model = meta(kind)
    if lora is not None:
        add_adapter(model, lora)
    plan = MeshPlanner(model, CONFIG).plan(Workload(TrainConfig(lora=lora), (LENGTH,)), degrees)
    assert found == tuple(plan.bytes_of(name) for name in ("parameters", "gradients", "optimizer moments"))


def one_row(num=1):
    samples = [
        Sample(tuple((7 * i + 3 * j) % 64 for j in range(LENGTH)), (Origin.PROMPT,) * LENGTH, (False,) + (True,) * (LENGTH - 1),
               (0.0,) * LENGTH, (-1,) * LENGTH, f"g{i}", f"g{i}")
        for i in range(num)
    ]  # fmt: skip
    batch = batch_of(samples)
    return batch.with_(weights=REDUCERS["token_mean"](batch))


def sent_in_a_step(kind, degrees, recompute, lora=None):
    model = model_of(kind, gradient_checkpointing=recompute)
    backend = backend_of(model, degrees, max_tokens_per_device=LENGTH // degrees.context, logprob_chunk_tokens=LENGTH, lora=lora)
    batch = one_row(degrees.num_data)
    backend.forward_backward(batch, sft_loss)  # the first pass makes what is made once
    backend.optimizer.zero_grad()
    with SentBytes() as counted:
        backend.forward_backward(batch, sft_loss)
    return dict(counted.sent)


SENT = [
    ("dense", {"shard": 2}, False),
    ("tied", {"replicate": 2, "shard": 2}, False),
    ("dense", {"tensor": 2}, False),
    ("dense", {"tensor": 2}, True),
    ("moe", {"tensor": 2}, True),
    ("dense", {"context": 2}, True),
    ("tied", {"context": 4}, False),
    ("dense", {"context": 2, "context_attention": "gather"}, False),
    ("moe", {"shard": 2, "expert": 2}, True),
    ("moe", {"shard": 2, "tensor": 2, "expert": 4}, False),
    ("moe", {"shard": 2, "tensor": 2, "expert": 4}, True),
    ("dense", {"shard": 2, "tensor": 2}, False),
]


ADAPTED = [("dense", {"tensor": 2}, False), ("dense", {"shard": 2, "tensor": 2}, True), ("moe", {"shard": 2, "expert": 2}, False)]


SENT_BY = [*((*each, None) for each in SENT), *((*each, LORA) for each in ADAPTED)]


@pytest.mark.parametrize(("kind", "degrees", "recompute", "lora"), SENT_BY)
def test_what_a_rank_sends_is_what_the_formula_says(kind, degrees, recompute, lora):
    degrees = ParallelConfig(**degrees)
    counted = on_ranks(degrees.num_ranks, sent_in_a_step, kind, degrees, recompute, lora)
    model = meta(kind)
    if lora is not None:
        add_adapter(model, lora)
    flows = flows_of(model, groups_of(model, degrees), degrees, Passes(1, LENGTH // degrees.context, recompute))
    mean = sum(sum(each.values()) for each in counted) / len(counted)
    print(kind, degrees, recompute, counted[0], mean, [(f.what, f.sent_bytes) for f in flows])
    assert sum(flow.sent_bytes for flow in flows) == pytest.approx(mean, rel=0.03)


def devices(count, memory, per_node=8):
    return DeviceSet(count, memory, per_node)


def step_of(samples=64, longest=LENGTH, budget=LENGTH):
    return StepSizes(samples, longest, budget, lambda row_ranks: Workload(TrainConfig(max_tokens_per_device=budget), (longest,)))


DEEP = {**SIZES, "num_hidden_layers": 6, "hidden_size": 64, "vocab_size": 256}


def test_few_layers_tell_of_many():
    model = meta_causal(Qwen3Config(**DEEP), CONFIG)
    degrees = ParallelConfig(shard=2, tensor=2)
    quick, whole = MeshPlanner(model, CONFIG), MeshPlanner(model, CONFIG)
    whole._few = ()
    a, b = (planner.plan(Workload(TrainConfig(), (LENGTH,), reference=True), degrees) for planner in (quick, whole))
    for few, all_layers in zip(a.parts, b.parts, strict=True):
        assert few.name == all_layers.name and few.size_bytes == pytest.approx(all_layers.size_bytes, rel=0.02), few.name


def test_every_layout_gives_every_device_something_to_do():
    for kind in ("dense", "moe"):
        found = list(degrees_for(meta(kind), devices(8, 2**30, per_node=4), samples=4))
        assert len({each.model_dump_json() for each in found}) == len(found)
        for each in found:
            assert each.num_ranks == 8 and each.num_data <= 4 and each.tensor * each.context <= 4
            assert each.tensor in (1, 2) and (each.expert == 1 or kind == "moe")
        assert any(each.expert == 4 for each in found) == (kind == "moe")


def test_the_choice_is_the_least_exchange_that_fits():
    model = meta_causal(Qwen3Config(**DEEP), CONFIG)
    found = layouts(model, CONFIG, step_of(), devices(8, 2**40))
    roomy = choose(found, devices(8, 2**40))
    assert roomy.degrees == ParallelConfig(replicate=8), "replicas exchange gradients once a step and nothing else"
    limit = min(layout.plan.peak_bytes for layout in found)
    tight = choose(found, devices(8, int(limit / 0.9) + 1))
    assert tight.plan.peak_bytes == limit < roomy.plan.peak_bytes and tight.seconds > roomy.seconds
    words = " ".join(reasons(tight, devices(8, limit)))
    assert "parameters" in words and "parameters put together" in words and "a step" in words
    with pytest.raises(ValueError, match=r"nothing fits 8 devices of .* largest parts: .*\(.*\)"):
        choose(found, devices(8, limit // 2))


def test_no_layout_has_more_ranks_with_rows_than_samples():
    model = meta("dense")
    with pytest.raises(ValueError, match="give each a sample of the step"):
        choose(layouts(model, CONFIG, step_of(samples=1), devices(16, 2**40, per_node=2)), devices(16, 2**40, per_node=2))


def saved_bytes(dtype, degrees):
    """Bytes of what a rank copies of a checkpoint's tensors."""
    backend = backend_of(model_of("dense", dtype), degrees)
    backend.forward_backward(one_row(), sft_loss)
    backend.optim_step()
    tensors = [t for file in backend._kept().tensors.values() for t in file.values()]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_copy_of_a_checkpoint_is_what_a_rank_copies(dtype):
    """A mesh keeps float32 parameters, which need no masters beside them."""
    model = meta_causal(CONFIGS["dense"](), CONFIG.model_copy(update={"dtype": dtype}))
    for degrees in (None, ParallelConfig(shard=2), ParallelConfig(replicate=2)):
        config = TrainConfig(parallel=degrees)
        found = saved_bytes(dtype, None) if degrees is None else on_ranks(2, saved_bytes, dtype, degrees)[0]
        parts = 1 if degrees is None else degrees.shard
        assert found == pytest.approx(checkpoint_bytes(model, config, spread=degrees is not None) / parts, rel=0.01)


def test_experts_that_ranks_cannot_share_evenly_are_refused_before_anything_is_started():
    config = CONFIGS["moe"]()
    config.num_experts = 6
    model, uneven = meta_causal(config, CONFIG), ParallelConfig(shard=4, expert=4)
    with pytest.raises(ValueError, match=r"teacher: teacher\.parallel: Qwen3Moe.* has 6 experts, which 4 ranks of expert cannot share"):
        check_spread("teacher", model, uneven, TrainConfig(), "teacher.parallel")
    check_spread("teacher", model, ParallelConfig(shard=4, expert=2), TrainConfig(), "teacher.parallel")


def test_forests_are_refused_where_ranks_gather_keys_and_values():
    gathers = ParallelConfig(context=2, context_attention="gather")
    with pytest.raises(ValueError, match=r"critic: train\.rows is forest, but with critic\.parallel\.context=2"):
        check_spread("critic", meta("dense"), gathers, TrainConfig(rows="forest"), "critic.parallel")
    check_spread("critic", meta("dense"), ParallelConfig(context=2), TrainConfig(rows="forest"), "critic.parallel")
