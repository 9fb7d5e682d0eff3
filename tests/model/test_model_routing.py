"""Routers of each known architecture: told what they choose by themselves they compute the same bits, and others are refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Dots1Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.engine.engine_setup import SHAPE, tiny
from tests.engine.test_engine_architectures import MLA, MOE
from whet.model.attention import PackedRow
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.routing import GATES, Routers

GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS = {
    "Qwen2MoeTopKRouter": lambda: Qwen2MoeConfig(**SHAPE, **MOE, num_experts=4, shared_expert_intermediate_size=48),
    "Qwen3MoeTopKRouter": lambda: Qwen3MoeConfig(**SHAPE, **MOE | {"norm_topk_prob": False}, head_dim=16, num_experts=4),
    "OlmoeTopKRouter": lambda: OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    "MixtralTopKRouter": lambda: MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Glm4MoeTopkRouter": lambda: Glm4MoeConfig(**SHAPE, **MOE, **GROUPS, head_dim=16, routed_scaling_factor=1.7),
    "DeepseekV3TopkRouter": lambda: DeepseekV3Config(**(SHAPE | MOE | MLA)),
    "Dots1TopkRouter": lambda: Dots1Config(**SHAPE, **MOE, **GROUPS, n_shared_experts=1, layer_types=["full_attention"] * 2),
}


def model_of(name):
    return random_causal(CONFIGS[name](), ModelConfig(path="", dtype="float32", device="cpu"), seed=0)


def passed(model, tokens, told=None):
    row = PackedRow([len(tokens)], model.device)
    with torch.no_grad(), Routers(model.hf).watched(told) as seen:
        return model.hidden(tokens, row.positions, row), seen


def test_every_known_router_has_a_model_here():
    assert CONFIGS.keys() == GATES.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_own_choices_give_the_same_bits_and_others_do_not(name):
    model, tokens = model_of(name), torch.arange(1, 24)
    plain, seen = passed(model, tokens)
    own = seen.routes()
    assert type(Routers(model.hf)._gates[0]).__name__ == name and own.dtype == torch.uint8
    again, seen = passed(model, tokens, own)
    assert torch.equal(again, plain)
    assert all(int(count) == 0 for count in seen.num_differ.values()) and all(int(count) == 23 for count in seen.num_given.values())
    other, seen = passed(model, tokens, own % 4 + 1)
    assert float((other - plain).abs().max()) > 1e-3
    assert sum(map(int, seen.num_differ.values())) > 0
    none, seen = passed(model, tokens, torch.zeros_like(own))
    assert torch.equal(none, plain) and sum(map(int, seen.num_given.values())) == 0


def test_the_weights_of_other_experts_are_the_definition_s():
    model, tokens = model_of("DeepseekV3TopkRouter"), torch.arange(1, 24)
    gate = Routers(model.hf)._gates[0]
    given, seen = [], []
    hooks = [gate.register_forward_hook(lambda _, hidden, output: given.append((hidden[0], output)))]
    told = passed(model, tokens)[1].routes() % 4 + 1
    with Routers(model.hf).watched(told):
        hooks.append(gate.register_forward_hook(lambda _, hidden, output: seen.append(output)))  # behind the replay
        row = PackedRow([23], model.device)
        model.hidden(tokens, row.positions, row)
    for hook in hooks:
        hook.remove()
    hidden = given[-1][0].reshape(-1, 64).double()
    scores = (hidden @ gate.weight.double().T).sigmoid().gather(-1, told[:, 0].long() - 1)
    expected = scores / scores.sum(-1, keepdim=True) * gate.routed_scaling_factor
    torch.testing.assert_close(seen[-1][1].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(seen[-1][2], told[:, 0].long() - 1)


def test_nothing_stays_on_a_model_that_was_watched():
    model, tokens = model_of("Qwen3MoeTopKRouter"), torch.arange(1, 9)
    with pytest.raises(KeyError), Routers(model.hf).watched():
        raise KeyError
    assert not any(gate._forward_hooks for gate in Routers(model.hf)._gates)
    passed(model, tokens)
    assert not any(gate._forward_hooks for gate in Routers(model.hf)._gates)


def test_engines_may_tell_of_layers_without_routers():
    routers = Routers(model_of("Glm4MoeTopkRouter").hf)
    assert routers.layers == [1] and routers.num_layers == 2
    assert routers.columns((5, 1, 2)) == [0] and routers.columns((5, 2, 2)) == [1]
    for shape in ((5, 3, 2), (5, 1, 3)):
        with pytest.raises(ValueError, match="the engine runs another model"):
            routers.columns(shape)


def test_other_architectures_are_refused_by_name():
    with pytest.raises(ValueError, match=r"train.routing_replay: Qwen3ForCausalLM has no experts, so there is no routing to replay"):
        Routers(tiny().hf)
    config = GptOssConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match=r"whet does not know how GptOssForCausalLM routes .* it replays DeepseekV3TopkRouter, "):
        Routers(AutoModelForCausalLM.from_config(config))
