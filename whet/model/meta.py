"""A model without memory: its tensors have shapes and types, and no contents. For questions about a folder that need no weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from whet.model.causal import CausalModel, config_of, unloadable
from whet.model.config import ModelConfig
from whet.model.contents import without_tensors
from whet.model.decoder import DecoderModel
from whet.model.recompute import recompute_layers
from whet.model.scalar import KIND, ScalarModel, is_headless, require_one_label

Decoder = TypeVar("Decoder", bound=DecoderModel)
def read_meta(folder: Path, config: ModelConfig, *, key: str = "model.path") -> CausalModel:
    """The model that `load_causal` would make of a folder, by its config.json alone: without contents, and not checked.

    Raises:
        ValueError: if there is no config.json, or none of a causal language model.
    """
    hf_config = config_of(folder, config, key=key)
    try:
        return meta_causal(hf_config, config)
    except Exception as error:  # transformers raises what its parts raise
        raise unloadable(folder, error, key=key) from error


def read_meta_scalar(folder: Path, config: ModelConfig, *, key: str = "model.path") -> ScalarModel:
    """The model that `load_scalar` would make of a folder, with a new head if need be, by its config.json alone: without contents.

    Raises:
        ValueError: as `load_scalar` does.
    """
    hf_config = config_of(folder, config, key=key)
    require_one_label(folder, hf_config, headless=is_headless(hf_config), key=key)
    try:
        hf = _without_contents(AutoModelForSequenceClassification, hf_config, config)
    except Exception as error:  # transformers raises what its parts raise
        raise unloadable(folder, error, key=key, called=KIND) from error
    return ScalarModel(hf)


def meta_like(model: CausalModel | ScalarModel, hf_config: PreTrainedConfig, config: ModelConfig) -> CausalModel | ScalarModel:
    """A model of the same kind and the given shape, without contents and not checked."""
    if isinstance(model, CausalModel):
        return meta_causal(hf_config, config)
    return ScalarModel(_without_contents(AutoModelForSequenceClassification, hf_config, config))


def meta_causal(hf_config: PreTrainedConfig, config: ModelConfig) -> CausalModel:
    """A model of the given shape, without contents and not checked."""
    return CausalModel(_without_contents(AutoModelForCausalLM, hf_config, config))


def _without_contents(auto: Any, hf_config: PreTrainedConfig, config: ModelConfig) -> PreTrainedModel:
    hf = without_tensors(auto, hf_config, getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code)
    if config.gradient_checkpointing:
        recompute_layers(hf, config.gradient_checkpointing, config.gradient_checkpointing_every)
    return hf


def without_contents(model: Decoder) -> Decoder:
    """The same model without contents; what is tied stays so."""
    return _with_tensors(model, lambda tensor: torch.empty_like(tensor, device="meta"))


def copied_to(model: Decoder, device: torch.device) -> Decoder:
    """The same model on a device, tensor by tensor: memory elsewhere holds no second copy of it. What is tied stays so."""
    return _with_tensors(model, lambda tensor: tensor.detach().to(device, copy=True))


def _with_tensors(model: Decoder, made: Callable[[Tensor], Tensor]) -> Decoder:
    """A copy of a model with other tensors in place of its own."""
    known: dict[int, Any] = {}
    for tensor in (*model.hf.parameters(), *model.hf.buffers()):
        new = made(tensor)
        known[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(model, known)
