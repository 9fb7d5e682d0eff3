"""Digests of tensors, computed where the tensors are: a number that changes with any bit, any place, any name."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

CHUNK_WORDS = 2**18
"""Words that are summed at a time, so that a digest needs little memory in addition to the tensor."""
LOW = 0xFFFFFFFF


def tensor_digest(tensor: Tensor) -> bytes:
    """A position-dependent hash of a tensor's bytes: 8 bytes.

    The tensor is cut into chunks of 4-byte words. Each word is multiplied by an odd 64-bit number that depends on its place
    in the chunk, and the products are summed modulo 2^64. One changed word always changes its chunk's sum. So do two words
    that swap places: they differ in their low 32 bits, the multipliers in their low 33, so the product of the differences is
    not 0 modulo 2^64. The sums, in order, are hashed with BLAKE2.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    spare = -data.numel() % 4
    if spare:
        data = torch.cat([data, data.new_zeros(spare)])
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32)
    multipliers = _multipliers(CHUNK_WORDS, words.device)
    sums = [(chunk * multipliers[: chunk.numel()]).sum() for chunk in words.split(CHUNK_WORDS)]
    numbers: list[int] = torch.stack(sums).tolist()
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()


def digests_of(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """A hex digest of each named tensor: its dtype, shape and contents."""
    out: dict[str, str] = {}
    seen: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # tied tensors are read once
    for name, tensor in weights:
        holder, digest = seen.get(id(tensor), (None, ""))
        if holder is None or holder() is not tensor:  # a stream's tensor may be gone by now, and another be in its place
            facts = f"{tensor.dtype}:{tuple(tensor.shape)}:".encode()
            digest = hashlib.blake2b(facts + tensor_digest(tensor), digest_size=8).hexdigest()
            seen[id(tensor)] = weakref.ref(tensor), digest
        out[name] = digest
    return out


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Differences between two sets of digests, in words: tensors missing, unknown, swapped with each
    other, or of other contents."""
    out = [f"{name} is missing" for name in expected.keys() - found.keys()]
    out += [f"{name} is unknown" for name in found.keys() - expected.keys()]
    wrong = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    holder = {expected[name]: name for name in wrong}
    for name in wrong:
        other = holder.get(found[name])
        if other is None:
            out.append(name)
        elif found[other] != expected[name]:
            out.append(f"{name} holds {other}")
        elif name < other:
            out.append(f"{name} and {other} are swapped")
    return sorted(out)


@lru_cache(maxsize=8)
def _multipliers(count: int, device: torch.device) -> Tensor:
    """Odd, irregular 64-bit numbers; the low 33 bits of any two differ. [count] int64"""
    mixed = _mix(torch.arange(count, device=device))
    return (_mix(mixed ^ 0x5BD1E995) << 33) | (mixed << 1) | 1


def _mix(x: Tensor) -> Tensor:
    """A bijection of the 32-bit numbers in which every bit depends on all (MurmurHash3's finaliser)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)
