"""Compiled layers on a mesh: the loss, gradients and steps of one process whose layers are not compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.parallel import ranks
from tests.parallel.ranks import on_ranks
from tests.parallel.tiny_models import alone, relative, three_steps
from whet.train.torch_native.config import ParallelConfig

pytestmark = pytest.mark.long


def compiled(compiler, kind, degrees, recompute):
    torch._dynamo.reset()  # what other tests had compiled in the process that this one is a fork of
    torch.compile = partial(torch.compile, backend=compiler)  # of this rank's process
    return three_steps(kind, "grpo", degrees, {"compile": True, "gradient_checkpointing": recompute})


@pytest.mark.parametrize(
    ("kind", "degrees", "recompute", "compiler"),
    [
        ("tied", {"shard": 2}, True, "aot_eager"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("dense", {"shard": 2}, False, "inductor"),
                ("dense", {"shard": 2}, "selective", "inductor"),
                ("tied", {"replicate": 2, "shard": 2}, True, "aot_eager"),
                ("dense", {"context": 2}, False, "aot_eager"),
                ("moe", {"shard": 2}, False, "aot_eager"),
            ]
        ),
    ],
)
def test_compiled_layers_learn_as_others_do(kind, degrees, recompute, compiler, monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT_S", 240)  # on a busy machine compiling takes a minute
    expected, degrees = alone(kind, "grpo"), ParallelConfig(**degrees)
    for rank, found in enumerate(on_ranks(degrees.num_ranks, compiled, compiler, kind, degrees, recompute)):
        assert found["metrics"]["time/compile_s"] > 0
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        if rank == 0:  # it alone has all tokens
            torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-5)
        for part in ("grads", "weights"):
            assert found[part].keys() == expected[part].keys()
            for name, tensor in expected[part].items():
                assert relative(found[part][name], tensor) < 1e-5, (part, name)
