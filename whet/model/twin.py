"""A small random model of the same architecture, for checks of a model that need no weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from whet.model.attention import ATTENTION
from whet.model.causal import CausalModel
from whet.model.config import ModelConfig

VOCAB = 64
WIDTH = 64
"""Width of the feed-forward parts, which attention does not depend on."""
MAX_LAYERS = 4


class NoTwin(Exception):
    """No small model can be made of a configuration; the text says why."""


def small_twin(hf_config: PreTrainedConfig, config: ModelConfig) -> CausalModel:
    """A float32 model on the CPU with the same attention, in two layers, or one of each kind where there are more kinds.

    Vocabulary and feed-forward width are small where the configuration lets them be.

    Raises:
        NoTwin: the configuration cannot be cut.
    """
    try:
        return _random(_cut(hf_config, narrow=True), config)
    except Exception:  # a model raises anything whose configuration was cut where it may not be
        pass  # some part of it depends on the widths: they stay as they are
    try:
        return _random(_cut(hf_config, narrow=False), config)
    except Exception as error:  # as above
        raise NoTwin(f"{type(error).__name__}: {error}") from error


def layers_to_keep(hf_config: PreTrainedConfig) -> list[int]:
    """The first layer of each kind, by every list in the configuration that has an entry for each layer; at least two layers."""
    text = hf_config.get_text_config()
    lists = _per_layer(text)
    first: dict[str, int] = {}
    for i in range(text.num_hidden_layers):
        first.setdefault(repr([values[i] for values in lists.values()]), i)
    kept = sorted(first.values())[:MAX_LAYERS]
    for i in range(text.num_hidden_layers):
        if len(kept) < 2 and i not in kept:
            kept.append(i)
    return sorted(kept)


def _per_layer(text: PreTrainedConfig) -> dict[str, list[Any]]:
    num = text.num_hidden_layers
    return {key: value for key, value in vars(text).items() if isinstance(value, list) and len(value) == num and num > 1}


def _cut(hf_config: PreTrainedConfig, *, narrow: bool) -> PreTrainedConfig:
    cut = copy.deepcopy(hf_config)
    text = cut.get_text_config()
    kept = layers_to_keep(cut)
    for key, values in _per_layer(text).items():
        setattr(text, key, [values[i] for i in kept])
    text.num_hidden_layers = len(kept)
    if narrow:
        text.vocab_size = min(text.vocab_size, VOCAB)
        text.pad_token_id = None  # it would lie outside of the small vocabulary
        for key in ("intermediate_size", "moe_intermediate_size"):
            width = getattr(text, key, None)
            if isinstance(width, int):
                setattr(text, key, min(width, WIDTH))
    return cut


def _random(hf_config: PreTrainedConfig, config: ModelConfig) -> CausalModel:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the same model every time; the run's own generator is left alone
        hf = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=ATTENTION, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    hf.eval().requires_grad_(False)
    return CausalModel(hf)
