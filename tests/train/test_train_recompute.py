"""Layers whose activations are computed again have the gradient of those that keep them, whatever the rows."""

from __future__ import annotations

import pytest

from tests.train.tiny_policy import gradients, policy, relative, rollout_samples
from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import REDUCERS
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig


def gradient_of(rows, recompute):
    batch = batch_of([*rollout_samples(), *rollout_samples()])
    model = policy("float64", gradient_checkpointing=recompute)
    config = TrainConfig(rows=rows, max_tokens_per_device=60, logprob_chunk_tokens=7)
    TorchBackend(model, config, 1).forward_backward(batch.with_(weights=REDUCERS["sample_mean"](batch)), sft_loss)
    return gradients(model)


@pytest.mark.parametrize("rows", ["chains", "forest"])
@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputed_layers_have_the_same_gradient(rows, recompute):
    kept, found = gradient_of("chains", False), gradient_of(rows, recompute)
    assert max(relative(found[name], kept[name]) for name in kept) < 1e-12
