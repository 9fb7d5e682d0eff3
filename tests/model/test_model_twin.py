"""Small twins: cut where a configuration can be cut, with the attention that it has."""

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, Qwen3Config, Qwen3NextConfig

from whet.model.config import ModelConfig
from whet.model.twin import VOCAB, NoTwin, layers_to_keep, small_twin

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 4096,
    "vocab_size": 50_000,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 49_999,
}
SETTINGS = ModelConfig(path="tiny")


def test_a_twin_has_the_attention_and_little_else():
    config = Qwen3Config(**SIZES, head_dim=48)
    twin = small_twin(config, SETTINGS)
    twin.check()
    assert (twin.config.num_hidden_layers, twin.vocab_size, twin.config.intermediate_size) == (2, VOCAB, 64)
    assert (twin.config.head_dim, twin.config.num_key_value_heads) == (48, 2)
    assert twin.hf.model.layers[1].self_attn.q_proj.weight.shape == (4 * 48, 64)
    assert (config.num_hidden_layers, config.vocab_size, config.pad_token_id) == (12, 50_000, 49_999), "the original is left alone"


def test_a_twin_is_the_same_every_time_and_leaves_the_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = (small_twin(LlamaConfig(**SIZES), SETTINGS) for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    weights = zip(first.named_weights(), second.named_weights(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in weights)


def test_one_layer_of_each_kind_is_kept():
    mixed = Qwen3Config(**SIZES, layer_types=["full_attention"] * 8 + ["sliding_attention"] * 4, sliding_window=4, use_sliding_window=True)
    assert layers_to_keep(mixed) == [0, 8]
    with pytest.raises(ValueError, match="window of 4 tokens"):
        small_twin(mixed, SETTINGS).check()
    assert layers_to_keep(Qwen3Config(**SIZES)) == [0, 1]
    assert layers_to_keep(Qwen3Config(**{**SIZES, "num_hidden_layers": 1})) == [0]


@pytest.mark.parametrize("make", [Gemma2Config, Qwen3NextConfig])
def test_an_architecture_that_whet_cannot_run_is_refused_by_its_twin(make):
    with pytest.raises(ValueError, match=r"does not support|cannot run"):
        small_twin(make(**SIZES), SETTINGS).check()


def test_a_config_that_cannot_be_cut_says_why():
    with pytest.raises(NoTwin, match="no_such"):
        small_twin(LlamaConfig(**SIZES, hidden_act="no_such"), SETTINGS)
