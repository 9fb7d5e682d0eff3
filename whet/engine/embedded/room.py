"""The size of the embedded engine's cache, where the settings do not say it."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.engine.embedded.config import EmbeddedConfig
from whet.model.causal import CausalModel
from whet.runfolder.machine import device_memory

SHARE = 5
"""The cache has a fifth of the device's memory, at most."""
LONGEST = 32_768
"""Tokens of the longest sequence, where nobody says."""


def with_cache(sizes: EmbeddedConfig, model: CausalModel, longest: int | None = None, device: torch.device | None = None) -> EmbeddedConfig:
    """The sizes with `cache_tokens`: what they say, else enough for the sequences that run together, within `SHARE` of the device's memory.

    There is always room for one sequence of `longest` tokens, so that no length is refused for want of cache.

    Args:
        sizes: as the settings have them.
        model: the one that samples, with or without contents.
        longest: tokens of the longest sequence; None: not known.
        device: device of the cache; None: the model's.
    """
    if sizes.cache_tokens is not None:
        return sizes
    device = device or model.device
    most = min(longest or LONGEST, model.max_positions or LONGEST)
    sharing = sizes.copies if device.type == "cpu" else 1
    room = device_memory(device)[0] // SHARE * sizes.tensor_parallel // (token_bytes(model) * sharing)
    tokens = max(min(sizes.max_running * most, room), most if longest is not None else min(most, room))
    return sizes.model_copy(update={"cache_tokens": -(-tokens // sizes.block_size) * sizes.block_size})


def token_bytes(model: CausalModel) -> int:
    """Bytes of the keys and values of one token in all layers."""
    found = 0

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        nonlocal found
        found += k.nbytes + v.nbytes
        return q.new_zeros(*q.shape[:2], v.shape[-1])

    token = torch.zeros(1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model.hidden(token, token, attend)
    return found
