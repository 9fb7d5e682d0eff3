"""Compiled layers: the gradients are those of the layers as they are, and only training runs them."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

from tests.train.tiny_policy import gradients, policy, relative, rollout
from whet.algo.base import Need
from whet.algo.sft import sft_loss
from whet.core.weights import REDUCERS
from whet.model import compiled
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What another test's model of the same shapes had compiled would be used again."""
    torch.compiler.reset()


def backend_of(recompute=False, **settings):
    model = policy(gradient_checkpointing=recompute)
    return TorchBackend(model, TrainConfig(max_tokens_per_device=40, **settings), total_steps=1)


def learn(backend):
    batch = rollout()
    return backend.forward_backward(batch.with_(weights=REDUCERS["token_mean"](batch)), sft_loss)


@pytest.mark.parametrize(
    ("rows", "recompute", "compiler"),
    [
        ("chains", False, "aot_eager"),
        pytest.param("forest", True, "aot_eager"),
        pytest.param("chains", "selective", "aot_eager"),
        pytest.param("chains", False, "inductor", marks=pytest.mark.slow),
        pytest.param("chains", True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_layers_that_are_not_compiled(rows, recompute, compiler, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    plain, found = backend_of(recompute, rows=rows), backend_of(recompute, rows=rows, compile=True)
    old = plain.annotate(rollout(), Need.OLD_LOGPROBS).old_logprobs
    torch.testing.assert_close(found.annotate(rollout(), Need.OLD_LOGPROBS).old_logprobs, old, rtol=1e-5, atol=1e-5)
    learn(plain)
    first = learn(found)
    assert first.metrics["time/compile_s"].value > 0
    expected = gradients(plain.model)
    for name, gradient in gradients(found.model).items():
        assert relative(gradient, expected[name]) < 1e-5, name
    assert learn(found).metrics["time/compile_s"].value == 0.0
    assert all("forward" not in vars(layer) for layer in found.model.decoder.layers)  # the engine's passes take them as they are


def test_without_a_compiler_it_is_refused(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda command: None)
    monkeypatch.setenv("CXX", "c-plus-plus-of-mine -O2")
    with pytest.raises(ValueError, match=r"train\.compile needs a C\+\+ compiler, and there is no c-plus-plus-of-mine: install one"):
        backend_of(compile=True)
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs triton on CUDA"):
        compiled.require_compiler(torch.device("cuda"))


@pytest.mark.parametrize("degree", ["tensor", "expert"])
def test_a_mesh_on_which_torch_cannot_compile_is_refused(degree):
    with pytest.raises(ValueError, match=rf"train\.compile does not go with train\.parallel\.{degree} \(2\).*leave train\.compile out"):
        TrainConfig(compile=True, parallel={"shard": 2, degree: 2})
    assert TrainConfig(compile=True, parallel={"shard": 2}).compile
