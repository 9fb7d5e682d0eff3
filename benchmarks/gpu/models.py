"""Random models of real shapes, made where they compute: on a CPU an 8B model would take minutes to fill."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from whet.core.batch import TrainBatch, batch_of
from whet.core.weights import token_mean
from whet.model.attention import ATTENTION
from whet.model.causal import CausalModel, prepare
from whet.model.config import ModelConfig
from whet.types import Origin, Sample

SHAPES = {
    "0.6B": {
        "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "8B": {
        "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12_288, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "tiny": {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 192, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Qwen3's shapes of these sizes, and one for CPUs."""


def shape_of(size: str, **changes: Any) -> Qwen3Config:
    """A configuration of one of `SHAPES`."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return Qwen3Config(**{**SHAPES[size], "max_position_embeddings": 40_960, **ids, **changes})


def settings_of(size: str, device: torch.device, checkpointing: bool = False) -> ModelConfig:
    """How such a model is held: in bfloat16."""
    return ModelConfig(path=size, device=str(device), dtype="bfloat16", gradient_checkpointing=checkpointing)


def made(size: str, device: torch.device, *, trainable: bool = False, checkpointing: bool = False, **changes: Any) -> CausalModel:
    """A model with random weights, the same for the same device; `changes` are made to its shape."""
    torch.manual_seed(0)
    with device:
        hf = AutoModelForCausalLM.from_config(shape_of(size, **changes), attn_implementation=ATTENTION, dtype=torch.bfloat16)
    return prepare(hf, settings_of(size, device, checkpointing), trainable=trainable, check=False)


def weight_bytes(model: CausalModel) -> int:
    """Bytes of the weights; tied ones once."""
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for _, tensor in model.named_weights()}.values())


def batch_of_lengths(lengths: list[int], vocab: int) -> TrainBatch:
    """Random samples of so many tokens each; all but their first train."""
    generator = torch.Generator().manual_seed(len(lengths))
    samples = [
        Sample(
            tuple(torch.randint(vocab, (num,), generator=generator).tolist()), (Origin.PROMPT,) + (Origin.MODEL,) * (num - 1),
            (False,) + (True,) * (num - 1), (0.0,) * num, (-1,) + (0,) * (num - 1), f"g{i}", f"g{i}",
        )
        for i, num in enumerate(lengths)
    ]  # fmt: skip
    batch = batch_of(samples)
    return batch.with_(weights=token_mean(batch))
