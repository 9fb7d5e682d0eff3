"""Moments of eight bits on a mesh: one device's codes where blocks are the same, saved and read as they are, refused in other blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.parallel.ranks import on_ranks
from tests.parallel.tiny_models import backend_of, model_of, step_of
from whet.model.shards import whole
from whet.train.torch_native.config import OptimConfig, ParallelConfig
from whet.train.torch_native.optim import Optimizer
from whet.train.torch_native.optim_8bit import blocks_of

pytestmark = pytest.mark.long

CONFIG = OptimConfig(name="adamw_8bit", lr=0.01, weight_decay=0.1, clip_grad=None)
CUTS = {
    "rows": ((64, 256), [Shard(0), Replicate()]),
    "inside": ((64, 512), [Replicate(), Shard(1)]),
    "both": ((64, 512), [Shard(0), Shard(1)]),
    "strided": ((128, 160), [_StridedShard(0, split_factor=2), Shard(0)]),
    "stack": ((4, 128, 96), [Shard(0), Replicate()]),
    "uneven": ((67, 256), [Shard(0), Replicate()]),
    "other": ((64, 384), [Replicate(), Shard(1)]),
}


def stepped(mesh_shape):
    """Weights and moments after three steps, each put together."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("shard", "tensor")) if mesh_shape else None
    params, draw = {}, torch.Generator().manual_seed(0)
    for name, (shape, placements) in CUTS.items():
        tensor = torch.randn(shape, generator=draw)
        params[name] = nn.Parameter(tensor if mesh is None else distribute_tensor(tensor, mesh, placements))
    optimizer = Optimizer(params.items(), CONFIG, 3)
    for _ in range(3):
        for p in params.values():
            grad = torch.randn(p.shape, generator=draw)
            p.grad = grad if mesh is None else distribute_tensor(grad, mesh, p.placements)
        optimizer.step()
    tags = {name: blocks.tag if (blocks := blocks_of(p)) else None for name, p in params.items()}
    return {name: whole(t).clone() for name, t in optimizer.tensors().items()}, {n: whole(p.detach()) for n, p in params.items()}, tags


def test_a_cut_matrix_has_the_codes_of_a_whole_one():
    expected, weights, tags = stepped(None)
    assert tags == dict.fromkeys(CUTS, "256") | {"strided": "8x160", "stack": "8x128x96", "other": "2x384"} | {"stack": "1x128x96"}
    for found, cut, cut_tags in on_ranks(4, stepped, (2, 2)):
        assert cut_tags == tags | {"uneven": None, "other": "4x192"}
        for name in CUTS.keys() - {"uneven", "other"}:
            torch.testing.assert_close(cut[name], weights[name], rtol=1e-6, atol=1e-6)
            keys = [key for key in expected if key.endswith(f"/{name}")]
            assert len(keys) == 5 and all(torch.equal(found[key], expected[key]) for key in keys), name
        assert found["exp_avg/uneven"].dtype == torch.float32
        assert found["exp_avg.scale.4x192/other"].shape == (16, 6)


def trained(degrees, folder, what):
    """What two steps, a save and one more leave, or a load of what was saved, and one more."""
    backend = backend_of(model_of("wide"), degrees, optim={"name": "adamw_8bit", "lr": 1e-2, "weight_decay": 0.1})
    algorithm, batch = step_of("grpo")

    def run(steps):
        for _ in range(steps):
            backend.forward_backward(batch, algorithm.loss)
            backend.optim_step()

    if what == "save":
        run(2)
        backend.save(folder)
    else:
        run(1)  # of before the load
        backend.load(folder)
    saved = {name: whole(t).clone() for name, t in backend.optimizer.tensors().items()}
    run(1)
    return saved, {name: w.detach().clone() for name, w in backend.named_weights()}


SHARD, MIXED = ParallelConfig(shard=2), ParallelConfig(shard=2, tensor=2)


@pytest.mark.parametrize("degrees", [SHARD, pytest.param(MIXED, marks=pytest.mark.slow)])
def test_a_checkpoint_of_a_mesh_goes_on_bit_for_bit(degrees, tmp_path):
    expected = on_ranks(degrees.num_ranks, trained, degrees, tmp_path, "save")
    assert sum(".codes/" in name for name in expected[0][0]) >= 8
    found = on_ranks(degrees.num_ranks, trained, degrees, tmp_path, "load")
    for parts in zip(expected, found, strict=True):
        for a, b in zip(*parts, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    near = trained(None, tmp_path / "alone", "save")[1]
    for name, weight in near.items():
        assert float((found[0][1][name] - weight).abs().max()) < 0.02, name  # of three steps of 0.01


def refused(degrees, folder):
    backend = backend_of(model_of("wide"), degrees, optim={"name": "adamw_8bit"})
    with pytest.raises(ValueError) as caught:
        backend.load(folder)
    return str(caught.value)


def of_adamw(degrees, folder):
    backend_of(model_of("wide"), degrees, optim={"name": "adamw"}).save(folder)


def test_another_layout_reads_equal_blocks_and_is_refused_others(tmp_path):
    expected, _ = on_ranks(2, trained, SHARD, tmp_path, "save")[0]
    for found, _ in on_ranks(4, trained, ParallelConfig(shard=4), tmp_path, "load"):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    for degrees in (None, MIXED):
        texts = [refused(None, tmp_path)] if degrees is None else on_ranks(4, refused, degrees, tmp_path)
        assert all("rounded anew they would be others. Resume with the layout" in text for text in texts), texts


def test_a_mesh_refuses_another_optimizers_checkpoint(tmp_path):
    on_ranks(2, of_adamw, SHARD, tmp_path)
    for text in on_ranks(2, refused, SHARD, tmp_path):
        assert "is of optim.name=adamw, and this run has optim.name=adamw_8bit: set it to adamw" in text
