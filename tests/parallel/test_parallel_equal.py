"""A mesh finds what one process finds: loss, log-probs, metrics, every gradient, their norm, and the weights after three clipped steps."""

from __future__ import annotations

import pytest
import torch

from tests.lots import long_after
from tests.parallel.ranks import on_ranks
from tests.parallel.tiny_models import alone, relative, three_steps
from whet.train.torch_native.config import ParallelConfig


def assert_equal_to_one_process(kind, algorithm, degrees, settings=None):
    expected = alone(kind, algorithm)
    for rank, found in enumerate(on_ranks(degrees.num_ranks, three_steps, kind, algorithm, degrees, settings)):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert (found["tokens"], found["flops"]) == (expected["tokens"], expected["flops"])
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-6)
        if rank == 0:  # it alone has all tokens
            torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-5)
            for name, column in expected["terms"].items():
                torch.testing.assert_close(found["terms"][name], column, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)
        for part in ("grads", "weights"):
            assert found[part].keys() == expected[part].keys()
            for name, tensor in expected[part].items():
                assert relative(found[part][name], tensor) < 1e-5, (part, name)


QUICK = [
    ("tied", "gspo", {"shard": 2}),
    ("dense", "gspo", {"replicate": 2, "shard": 2}),
    ("tied", "grpo", {"shard": 2, "tensor": 2}),
    ("dense", "ppo", {"context": 2}),
    ("tied", "grpo", {"context": 4, "context_attention": "gather"}),
    ("moe", "ppo", {"shard": 4, "expert": 2}),
    ("moe", "grpo", {"context": 2, "tensor": 2, "expert": 4}),
]
KINDS = ("dense", "tied", "moe")
DEGREES = [
    {"shard": 2},
    {"shard": 4},
    {"replicate": 2},
    {"replicate": 2, "shard": 2},
    {"tensor": 2},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"context": 2},
    {"context": 2, "context_attention": "gather"},
    {"context": 4},
    {"context": 4, "context_attention": "gather"},
    {"shard": 2, "context": 2},
    {"replicate": 2, "context": 2},
    {"context": 2, "tensor": 2},
    {"context": 2, "tensor": 2, "context_attention": "gather"},
]
EXPERTS = [
    {"shard": 2, "expert": 2},
    {"shard": 4, "expert": 2},
    {"shard": 4, "expert": 4},
    {"tensor": 2, "expert": 2},
    {"shard": 2, "tensor": 2, "expert": 2},
    {"shard": 2, "tensor": 2, "expert": 4},
    {"replicate": 2, "shard": 2, "expert": 2},
    {"context": 2, "expert": 2},
    {"shard": 2, "context": 2, "expert": 4},
    {"context": 2, "tensor": 2, "expert": 4},
]
LOSSES = ("grpo", "gspo", "ppo")
MATRIX = [(kind, LOSSES[i % 3], degrees) for i, (kind, degrees) in enumerate((k, d) for k in KINDS for d in DEGREES)]
MATRIX += [("moe", LOSSES[i % 3], degrees) for i, degrees in enumerate(EXPERTS)]


@pytest.mark.parametrize(("kind", "algorithm", "degrees"), long_after(4, QUICK))
def test_a_mesh_is_one_process(kind, algorithm, degrees):
    assert_equal_to_one_process(kind, algorithm, ParallelConfig(**degrees))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "algorithm", "degrees"), MATRIX)
def test_every_mesh_is_one_process(kind, algorithm, degrees):
    assert_equal_to_one_process(kind, algorithm, ParallelConfig(**degrees))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "degrees", "what"),
    [
        ("dense", {"shard": 2, "tensor": 2}, True),
        ("dense", {"shard": 2, "tensor": 2}, "selective"),
        ("moe", {"shard": 2, "expert": 2}, "selective"),
        pytest.param("dense", {"context": 2}, True, marks=pytest.mark.slow),
        pytest.param("dense", {"context": 2}, "selective", marks=pytest.mark.slow),
        pytest.param("moe", {"context": 2, "tensor": 2, "expert": 4}, "selective", marks=pytest.mark.slow),
    ],
)
def test_activations_may_be_computed_again(kind, degrees, what):
    assert_equal_to_one_process(kind, "grpo", ParallelConfig(**degrees), {"gradient_checkpointing": what})


@pytest.mark.parametrize(
    ("kind", "degrees"), [("tied", {"shard": 2}), pytest.param("moe", {"shard": 2, "expert": 2}, marks=pytest.mark.slow)]
)
def test_parameters_may_lie_in_the_cpus_memory(kind, degrees):
    assert_equal_to_one_process(kind, "grpo", ParallelConfig(**degrees), {"offload": True})
