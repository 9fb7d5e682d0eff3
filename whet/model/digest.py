"""Digests of tensors, computed where the tensors are: a number that changes with any bit, any place, any name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_WORDS = 2**22
"""Words hashed at a time, so that a digest needs little memory beside the tensor."""
LOW = 0xFFFFFFFF


def tensor_digest(tensor: Tensor) -> int:
    """A position-dependent 64-bit hash of a tensor's bytes.

    Each 4-byte word, spread over 64 bits, is multiplied by an odd number that depends on its place; the products are
    summed modulo 2^64. One changed word always changes the sum. So does a swap of two words that differ, up to 16 GiB:
    the words differ in their low 32 bits, the multipliers in their low 33, so the product is never 0 modulo 2^64.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    spare = -data.numel() % 4
    if spare:
        data = torch.cat([data, data.new_zeros(spare)])
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=chunk.device)
        total += int(((chunk ^ (chunk << 32)) * _multipliers(places)).sum())
    return total & 0xFFFFFFFFFFFFFFFF


def digest_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hex digest of named tensors: names, dtypes, shapes and contents, in name order."""
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        total.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{tensor_digest(tensor):016x};".encode())
    return total.hexdigest()


def _multipliers(places: Tensor) -> Tensor:
    """Odd, irregular 64-bit numbers; the low 33 bits of any two of the first 2^32 differ."""
    mixed = _mix(places & LOW)
    return (_mix(mixed ^ 0x5BD1E995) << 33) | (mixed << 1) | 1


def _mix(x: Tensor) -> Tensor:
    """A bijection of the 32-bit numbers in which every bit depends on all (MurmurHash3's finaliser)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)
