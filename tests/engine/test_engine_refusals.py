"""Models with attention that whet does not have are refused by name, never run wrong."""

from __future__ import annotations

import pytest
import torch
from engine_setup import SHAPE
from torch import nn
from transformers import Gemma2Config, GptOssConfig, MistralConfig, Qwen2Config

from whet.model.attention import whet_attention
from whet.model.causal import ModelConfig, random_causal

WINDOW = SHAPE | {"sliding_window": 4}


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**WINDOW, head_dim=16),
        Qwen2Config(**WINDOW, use_sliding_window=True, max_window_layers=0),
        Gemma2Config(**WINDOW, head_dim=16),
        GptOssConfig(**WINDOW, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
    ],
    ids=lambda config: config.model_type,
)
def test_sliding_windows_are_refused_by_name(config):
    with pytest.raises(ValueError, match=f"(?i){config.model_type}.*(window of 4 |sliding_window).*not support"):
        random_causal(config, ModelConfig(path="", dtype="float32", device="cpu"), seed=0)


@pytest.mark.parametrize("feature", ["sliding_window", "softcap", "s_aux"])
def test_attention_features_are_refused_by_name(feature):
    class SomeAttention(nn.Module):
        layer_idx = 0

    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"SomeAttention needs the attention feature '{feature}'"):
        whet_attention(SomeAttention(), x, x, x, None, attend=lambda layer, q, k, v, scale: v, **{feature: 4})
