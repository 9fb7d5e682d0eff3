"""Activations that are computed again in the backward pass instead of kept: of whole layers, or of all but the dear parts of each."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

Recompute = bool | Literal["selective"]
KEPT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::_flash_attention_forward", "aten::_efficient_attention_forward")
"""Matrix products and attention: dear to compute, and what they give is no larger than what they take."""
ATTENTION = "aten::_scaled_dot_product_"
"""What the names of torch's attention kernels begin with."""


def recompute_layers(hf: PreTrainedModel, what: Recompute, every: int = 1) -> None:
    """Have layers' activations computed again in the backward pass; the gradient is the same.

    Args:
        hf: the model; changed in place.
        what: True: only a layer's inputs are kept; selective: the results of its matrix products and attention, too (arXiv 2205.05198).
        every: of so many layers, the first one's.
    """
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    hf.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    layers = [module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer)]
    for i, layer in enumerate(layers):
        layer.gradient_checkpointing = i % every == 0
        layer.training = True  # of the layer alone, which asks for it; what is inside stays without dropout


def _policy(_: Any, func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = func.name().partition(".")[0]
    kept = name in KEPT or name.startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
