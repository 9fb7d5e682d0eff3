"""Activations that are computed again in the backward pass instead of kept: of whole layers, or of all but the dear parts of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from whet.model.config import Recompute

KEPT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::_flash_attention_forward", "aten::_efficient_attention_forward")
"""Matrix products and attention: dear to compute, and what they give is no larger than what they take."""
ATTENTION = "aten::_scaled_dot_product_"
"""Prefix of the names of torch's attention kernels."""


def recompute_layers(hf: PreTrainedModel, what: Recompute, every: int = 1) -> None:
    """Have layers' activations computed again in the backward pass; the gradient is the same.

    Args:
        hf: the model; changed in place.
        what: True: only a layer's inputs are kept; selective: the results of its matrix products and
            attention, too (arXiv 2205.05198).
        every: number of layers of which the first one recomputes.

    Raises:
        ValueError: if the model has no such layers.
    """
    layers = _layers(hf)
    if not layers:
        raise ValueError(f"model.gradient_checkpointing is set, but {type(hf).__name__} has no layers that can be recomputed")
    kwargs: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a layer is random
    if what == "selective":
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    function = partial(_checkpointed, kwargs)
    # By transformers' attributes: the methods that set them have other names in other versions.
    for i, layer in enumerate(layers):
        layer._gradient_checkpointing_func = function  # pyright: ignore[reportArgumentType]
        layer.gradient_checkpointing = i % every == 0
        layer.training = True  # of the layer alone, which asks for it; what is inside stays without dropout


def recomputes(hf: PreTrainedModel) -> bool:
    """True if some layer's activations are computed again in the backward pass."""
    return any(layer.gradient_checkpointing for layer in _layers(hf))


def _layers(hf: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in hf.modules() if isinstance(module, GradientCheckpointingLayer)]


def _checkpointed(kwargs: Mapping[str, Any], layer: Callable[..., Any], *args: Any) -> Any:
    """A layer's pass; one without gradients, such as an engine's over the same layers, is a plain one."""
    return checkpoint(layer, *args, **kwargs) if torch.is_grad_enabled() else layer(*args)


def _policy(_: Any, func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not torch.is_grad_enabled():  # inside a function with a backward pass of its own, which may write over its products
        return CheckpointPolicy.PREFER_RECOMPUTE
    name = func.name().partition(".")[0]
    kept = name in KEPT or name.startswith(ATTENTION)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
