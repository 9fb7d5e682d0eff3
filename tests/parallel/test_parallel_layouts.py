"""Layouts of 8 to 64 ranks, built in one process on a fake process group: what each rank holds, and what it sends in a step."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.parallel.ranks import in_fake_world
from tests.parallel.tiny_models import SIZES, backend_of, samples
from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import REDUCERS
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.train.torch_native.config import ParallelConfig
from whet.train.torch_native.mesh import mesh_of

pytestmark = pytest.mark.long

WIDE = {**SIZES, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128, "vocab_size": 256}
MOE = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
LAYOUTS = [
    {"shard": 8},
    {"shard": 2, "context": 2, "tensor": 2},
    {"shard": 2, "context": 2, "tensor": 2, "expert": 8},
    {"replicate": 2, "shard": 4, "tensor": 2},
    {"replicate": 2, "shard": 2, "context": 2, "tensor": 2, "expert": 4},
    {"shard": 8, "context": 4, "expert": 16},
    {"shard": 4, "context": 2, "tensor": 4, "expert": 16},
    {"replicate": 4, "shard": 2, "context": 2, "tensor": 4, "expert": 16},
    {"replicate": 2, "shard": 4, "context": 2, "tensor": 4, "expert": 8},
    {"shard": 8, "context": 8, "expert": 16},
]


def model_of(degrees):
    config = Qwen3MoeConfig(**WIDE, **MOE) if degrees.expert > 1 else Qwen3Config(**WIDE)
    return random_causal(config, ModelConfig(path="tiny", device="cpu"), seed=0)


def layout(degrees):
    """Of each parameter: its whole shape, what this rank holds, and over which ranks it is cut."""
    backend = backend_of(model_of(degrees), degrees)
    mesh = mesh_of(degrees, "cpu")
    held = {}
    for name, p in backend.model.hf.named_parameters():
        assert isinstance(p, DTensor), name
        held[name] = (tuple(p.shape), p.to_local().numel(), p.device_mesh.mesh_dim_names, [str(x) for x in p.placements])
    return held, mesh.data_rank


@pytest.mark.parametrize("degrees", [ParallelConfig(**each) for each in LAYOUTS])
def test_each_rank_holds_its_share(degrees):
    whole = {name: tuple(p.shape) for name, p in model_of(degrees).hf.named_parameters()}
    last = degrees.num_ranks - 1
    for rank in (0, last):
        held, data_rank = in_fake_world(degrees.num_ranks, rank, layout, degrees)
        assert data_rank == (0 if rank == 0 else degrees.num_data - 1)
        assert {name: shape for name, (shape, *_) in held.items()} == whole
        for name, (shape, count, dims, placements) in held.items():
            if ".experts." in name and degrees.expert > 1:
                parts, last_dim = degrees.shard * degrees.context * degrees.tensor, "expert"
            else:
                split = degrees.tensor > 1 and any(word in name for word in ("proj", "embed_tokens", "lm_head"))
                parts, last_dim = degrees.shard * degrees.context * (degrees.tensor if split else 1), "tensor" if split else "shard"
            assert dims[-1] == last_dim, name
            assert ("replicate" in dims) == (degrees.replicate > 1), name
            if dims[0] == "replicate":
                assert placements[0] in ("R", "Replicate()"), name
            if shape[0] % parts == 0:
                assert count == math.prod(shape) // parts, name
            else:
                assert count <= math.prod((-(-shape[0] // parts), *shape[1:])) * max(degrees.tensor, 1), name


class Sent(TorchDispatchMode):
    """Elements that go through each kind of collective."""

    def __init__(self):
        super().__init__()
        self.elements = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_").removesuffix("_base")
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, torch.Tensor)]
            self.elements[name] += max(t.numel() * t.is_floating_point() for t in tensors)
        return func(*args, **(kwargs or {}))


def traffic(degrees):
    backend = backend_of(model_of(degrees), degrees, max_tokens_per_device=10_000)
    batch = batch_of(samples())
    batch = batch.with_(weights=REDUCERS["token_mean"](batch))
    (micro,) = backend._micro_batches(backend._share(batch, None), None)
    with Sent() as sent:
        out = backend._head.outputs(micro, entropy_grad=False)
        (micro.part.weights * sft_loss(micro.part, out).terms).sum().backward()
    return dict(sent.elements), len(micro.row.tokens)


def test_sharding_puts_layers_together_twice_and_the_rest_once_and_adds_up_gradients_once():
    degrees = ParallelConfig(shard=8)
    model = model_of(degrees)
    total = sum(p.numel() for p in model.hf.parameters())
    layers = sum(p.numel() for p in model.hf.model.layers.parameters())
    sent, _ = in_fake_world(8, 0, traffic, degrees)
    assert sent["allgather"] == 2 * layers + (total - layers)
    assert sent["reduce_scatter"] == total


@pytest.mark.parametrize("context", [2, 4, 8])
def test_ulysses_sends_each_ranks_part_of_a_row_and_no_more(context):
    """Queries, keys, values and outputs, forward and backward, in each of two layers."""
    sent, own = in_fake_world(16, 0, traffic, ParallelConfig(shard=16 // context, context=context))
    width = WIDE["num_attention_heads"] * WIDE["head_dim"]
    assert sent["alltoall"] == 2 * 2 * 4 * own * width


def test_replicas_add_up_what_a_rank_keeps():
    degrees = ParallelConfig(replicate=4, shard=4)
    total = sum(p.numel() for p in model_of(degrees).hf.parameters())
    sent, _ = in_fake_world(16, 0, traffic, degrees)
    assert sent["reduce_scatter"] == total
    assert total / 4 <= sent["allreduce"] < total / 4 + 100
