"""Digests of tensors, computed where the tensors are: a number that changes with any bit, any place, any name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_PRIME = 0x100000001B3
_STEP = 0x1E3779B97F4A7C15


def tensor_digest(tensor: Tensor) -> int:
    """A position-dependent 64-bit hash of a tensor's bytes.

    Each 4-byte word, whitened by an odd multiplier that depends on its place, is summed modulo 2^64: one changed word always changes
    the sum, and swapped words change it unless they are equal.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    spare = -flat.numel() % 4
    if spare:
        flat = torch.cat([flat, flat.new_zeros(spare)])
    words = flat.view(torch.int32).to(torch.int64)
    places = torch.arange(words.numel(), device=words.device, dtype=torch.int64)
    multiplier = (places * _STEP) ^ (places + _PRIME) << 17 | 1
    return int(((words ^ (words << 32)) * multiplier).sum().item()) & 0xFFFFFFFFFFFFFFFF


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hex digest of named tensors: names, dtypes, shapes and contents, in name order."""
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{tensor_digest(tensor):016x};".encode())
    return total.hexdigest()
