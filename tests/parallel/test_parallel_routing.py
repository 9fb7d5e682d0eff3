"""Ranks replay experts as one process does: each gets those of its own rows, and what an old pass chose comes back whole."""

from __future__ import annotations

import pytest
import torch

from tests.lots import long_after
from tests.parallel.ranks import on_ranks
from tests.parallel.routed import alone, replayed
from tests.parallel.tiny_models import relative
from whet.train.torch_native.config import ParallelConfig

MESHES = [
    ("rollout", {"shard": 2}),
    ("old", {"context": 2}),
    ("rollout", {"context": 2, "context_attention": "gather"}),
    ("rollout", {"tensor": 2}),
    ("old", {"shard": 2}),
    ("rollout", {"shard": 2, "expert": 2}),
    ("old", {"replicate": 2, "context": 2}),
    ("rollout", {"context": 2, "tensor": 2, "expert": 4}),
]


@pytest.mark.parametrize(("replay", "degrees"), long_after(1, MESHES))
def test_a_mesh_replays_as_one_process(replay, degrees):
    mesh, expected = ParallelConfig(**degrees), alone(replay)
    for rank, found in enumerate(on_ranks(mesh.num_ranks, replayed, mesh, replay)):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)  # of an old pass it is 0
        assert found["differs"] == pytest.approx(expected["differs"], abs=0.1)  # of ranks that share rows those of the first count
        if rank == 0:
            for name in ("logprobs", "old"):
                torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5)
            if replay == "old":
                assert torch.equal(found["routes"].sort(-1).values, expected["routes"].sort(-1).values)
        for name, grad in expected["grads"].items():
            assert relative(found["grads"][name], grad) < 1e-5, name


def test_planted_experts_are_used():
    assert alone("rollout")["differs"] > 0.3
    apart = (alone("rollout")["logprobs"] - alone("old")["logprobs"]).abs().max()
    assert float(apart) > 0.01
