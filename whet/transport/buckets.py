"""Tensors packed into buckets: a header (JSON: names, types, shapes) and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN = 16
"""Alignment in bytes of tensors in a bucket, so that they can be viewed as any type."""


@dataclass(slots=True)
class Bucket:
    """Tensors that travel together."""

    header: bytes
    """JSON: [name, dtype, shape, start] of each."""
    data: Tensor
    """[bytes] uint8"""


def buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Tensors packed one behind the other until a bucket is full; one that is larger than a bucket goes alone and is not copied."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if size + tensor.nbytes > bucket_bytes and waiting:
            yield _packed(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += -(-tensor.nbytes // ALIGN) * ALIGN
    if waiting:
        yield _packed(waiting)


def unpacked(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, over its memory."""
    for name, dtype, shape, start in json.loads(bucket.header):
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel() * kind.itemsize
        yield name, bucket.data[start : start + count].view(kind).view(shape)


def _packed(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    entries: list[tuple[str, str, list[int], int]] = []
    start = 0
    for name, tensor in tensors:
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
        start += -(-tensor.nbytes // ALIGN) * ALIGN
    header = json.dumps(entries).encode()
    if len(tensors) == 1:
        return Bucket(header, as_bytes(tensors[0][1]))
    data = torch.zeros(start, dtype=torch.uint8, device=tensors[0][1].device)
    for (_, tensor), (_, _, _, place) in zip(tensors, entries, strict=True):
        data[place : place + tensor.nbytes] = as_bytes(tensor)
    return Bucket(header, data)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, in order. [bytes] uint8"""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
