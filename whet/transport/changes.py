"""Exact changes between two tensors of one shape and type, in few bytes, for any type.

Both are read as whole numbers, so that no rounding, no NaN and no negative zero can be lost. If few
elements changed, the gaps between them and the exclusive or of old and new are written; if many did,
the exclusive or of all. Either is split into planes (all first bytes, all second bytes, and so on),
which compress better: the high bytes of small changes are mostly zero.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

LEVEL = 1
"""Level of zstandard: higher ones are slower than the disks and networks that they would save."""
SPARSE = 0.2
"""Share of changed elements up to which gaps are written."""
WIDTHS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

ChangeKind = Literal["same", "gaps", "all"]


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between two tensors."""

    kind: ChangeKind
    num_changed: int
    """Elements."""
    packed: bytes
    """Compressed."""
    raw_size: int
    """Size of `packed` before compression."""
    checksum: str
    """Checksum of `packed`."""


def change_of(old: Tensor, new: Tensor) -> Change:
    """The change from `old` to `new`: tensors of one shape and type, in the CPU's memory."""
    before, after = as_numbers(old), as_numbers(new)
    mixed = before ^ after
    places = np.flatnonzero(mixed)
    if not len(places):
        return Change("same", 0, b"", 0, checksum_of(b""))
    if len(places) <= SPARSE * len(mixed):
        gaps = np.diff(places, prepend=0).astype(np.uint32)
        raw = _planes(gaps) + _planes(mixed[places])
        return _packed("gaps", len(places), raw)
    return _packed("all", len(places), _planes(mixed))


def apply_change(old: Tensor, change: Change) -> Tensor:
    """The new tensor; `old` stays as it is.

    Raises:
        ValueError: if what was packed is damaged, or is of another tensor.
    """
    if change.kind == "same":
        return old
    if checksum_of(change.packed) != change.checksum:
        raise ValueError("what changed has another checksum than was written")
    raw = bytes(pa.decompress(change.packed, decompressed_size=change.raw_size, codec="zstd"))
    before = as_numbers(old)
    after = before.copy()
    if change.kind == "all":
        if len(raw) != after.nbytes:
            raise ValueError(f"what changed is of a tensor of {len(raw)} bytes, and this one has {after.nbytes}")
        after ^= _from_planes(raw, after.dtype)
    else:
        split = 4 * change.num_changed
        if len(raw) != split + change.num_changed * after.itemsize:
            raise ValueError("what changed is of a tensor of another type")
        places = np.cumsum(_from_planes(raw[:split], np.dtype(np.uint32)), dtype=np.int64)
        if places[-1] >= len(after):
            raise ValueError("what changed is of a larger tensor")
        after[places] ^= _from_planes(raw[split:], after.dtype)
    return torch.from_numpy(after).view(old.dtype).view(old.shape)


def as_numbers(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor's elements as whole numbers of the same bits. [elements]"""
    return tensor.detach().contiguous().view(-1).view(WIDTHS[tensor.element_size()]).numpy()


def checksum_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _packed(kind: ChangeKind, num_changed: int, raw: bytes) -> Change:
    packed = pa.Codec("zstd", LEVEL).compress(raw, asbytes=True)
    return Change(kind, num_changed, packed, len(raw), checksum_of(packed))


def _planes(numbers: npt.NDArray[Any]) -> bytes:
    """All first bytes, then all second bytes, and so on."""
    return numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.tobytes()


def _from_planes(data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
