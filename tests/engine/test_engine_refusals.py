"""Models with attention that whet does not have are refused by name, never run wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    DeepseekV32Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from tests.engine.engine_setup import SHAPE, engine_of, reply_to, serve
from tests.engine.test_engine_architectures import model_of
from whet.engine.base import EngineRefused
from whet.model.attention import whet_attention
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.types import Request, SamplingParams

WINDOW = SHAPE | {"sliding_window": 4}


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**WINDOW, head_dim=16),
        Qwen2Config(**WINDOW, use_sliding_window=True, max_window_layers=0),
        Gemma2Config(**WINDOW, head_dim=16),
        Gemma3TextConfig(**WINDOW, head_dim=16),
        GptOssConfig(**WINDOW, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
    ],
    ids=lambda config: config.model_type,
)
def test_sliding_windows_are_refused_by_name(config):
    with pytest.raises(ValueError, match=f"(?i){config.model_type}.*(window of 4 |sliding_window).*not support"):
        random_causal(config, ModelConfig(path="", dtype="float32", device="cpu"), seed=0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Llama4TextConfig(**SHAPE, head_dim=16, num_local_experts=2, intermediate_size_mlp=32), "llama4_text .* chunked attention"),
        (GptOssConfig(**SHAPE, head_dim=16, num_local_experts=2, layer_types=["full_attention"] * 2), "GptOss.* feature 's_aux'"),
        (BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "Bloom.* does not use transformers' attention interface"),
        (MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2), "Mamba.* does not use"),
        (JambaConfig(**SHAPE, num_experts=2), "Jamba.* does not use"),
        (FalconH1Config(**SHAPE), "FalconH1.* does not use"),
        (Qwen3NextConfig(**SHAPE, layer_types=["linear_attention", "full_attention"]), "Qwen3Next.* does not use"),
        (DeepseekV32Config(**SHAPE), "DeepseekV32.* cannot run through whet's attention: TypeError"),
    ],
    ids=lambda value: value.model_type if not isinstance(value, str) else "",
)
def test_what_is_no_plain_causal_attention_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        random_causal(config, ModelConfig(path="", dtype="float32", device="cpu"), seed=0)


@pytest.mark.parametrize("feature", ["sliding_window", "softcap", "s_aux", "sinks", "position_bias"])
def test_attention_features_are_refused_by_name(feature):
    class SomeAttention(nn.Module):
        layer_idx = 0

    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"SomeAttention needs the attention feature '{feature}'"):
        whet_attention(SomeAttention(), x, x, x, None, attend=lambda layer, q, k, v, scale: v, **{feature: 4})


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_sequences_whose_company_would_change_their_rotary_scaling_are_refused(kind):
    """256 tokens are as far as transformers' frequencies are the same for every sequence of a step."""
    engine = engine_of(model_of(kind, "float32"), cache_tokens=1024)
    assert engine.capabilities.max_tokens == 256

    async def play():
        with pytest.raises(EngineRefused, match="over the limit of 256"):
            await reply_to(engine, Request("far", (1,) * 250, SamplingParams(7)))
        with pytest.raises(EngineRefused, match="rotary scaling depends on the longest sequence of a step"):
            await engine.score((1,) * 257)

    serve(engine, play)
