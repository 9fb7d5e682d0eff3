"""How many floating-point operations a forward pass takes, from the shape of the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder's matrix products depend on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of a dense layer's gated MLP."""
    vocab_size: int
    num_moe_layers: int = 0
    """How many of the layers are mixtures of experts."""
    moe_ffn_size: int = 0
    """Width of all the experts that a token goes through, shared ones too."""


def forward_flops(shape: ModelShape, num_tokens: int) -> int:
    """Operations of one sequence: a product of [m, k] by [k, n] takes 2 m k n; attention is causal, so half of it counts."""
    heads = shape.num_heads * shape.head_dim
    projections = 2 * shape.hidden_size * (2 * heads + 2 * shape.num_kv_heads * shape.head_dim)
    dense = shape.num_layers - shape.num_moe_layers
    mlp = 6 * shape.hidden_size * (dense * shape.ffn_size + shape.num_moe_layers * shape.moe_ffn_size)
    per_token = shape.num_layers * projections + mlp + 2 * shape.hidden_size * shape.vocab_size
    return num_tokens * per_token + 2 * shape.num_layers * heads * num_tokens * num_tokens


def pass_flops(num_active: int, attention_width: int, num_tokens: int) -> int:
    """`forward_flops` where the model is known by its parameters.

    Args:
        num_active: entries of the matrices that a token goes through.
        attention_width: heads times their size, of all layers together.
        num_tokens: of the sequence.
    """
    return 2 * num_active * num_tokens + 2 * attention_width * num_tokens * num_tokens
