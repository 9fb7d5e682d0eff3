"""Parameters that stay as they are, by patterns."""

import pytest
import torch

from tests.train.tiny_policy import policy
from whet.model.freezing import freeze
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig


def trained(hf):
    return {name for name, p in hf.named_parameters() if p.requires_grad}


def test_patterns_freeze_and_the_last_one_counts():
    model = policy()
    every = trained(model.hf)
    count = freeze(model.hf, ["*embed_tokens*", "*.mlp.*"])
    assert every - trained(model.hf) == {name for name in every if "embed_tokens" in name or ".mlp." in name}
    assert count == sum(p.numel() for p in model.hf.parameters() if not p.requires_grad)
    other = policy()
    freeze(other.hf, ["*", "!*.layers.1.*"])
    assert trained(other.hf) == {name for name in every if ".layers.1." in name}


def test_a_tied_weight_goes_by_each_of_its_names():
    model = policy()
    freeze(model.hf, ["lm_head.*"])
    assert "model.embed_tokens.weight" not in trained(model.hf)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [(["*.mpl.*"], r"named like '\*\.mpl\.\*' .*; there are .*mlp"), (["*"], "leaves nothing to train")],
)
def test_patterns_without_effect_are_refused(patterns, words):
    with pytest.raises(ValueError, match=words):
        freeze(policy().hf, patterns)


def test_a_backend_steps_what_is_not_frozen():
    model = policy()
    backend = TorchBackend(model, TrainConfig(freeze=["*", "!*.layers.1.mlp.*"], optim={"lr": 0.1}), total_steps=1)
    before = {name: p.detach().clone() for name, p in model.hf.named_parameters()}
    for p in model.hf.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    backend.optim_step()
    changed = {name for name, p in model.hf.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".layers.1.mlp." in name}


def test_an_adapter_and_frozen_parameters_are_one_too_many():
    with pytest.raises(ValueError, match="with lora the model's own parameters do not train"):
        TrainConfig(freeze=["*"], lora={})
