"""A model whose tensors lie in one file of shared memory: several processes on a machine then hold its weights once.

The tensors are in the file; everything else of the model goes from process to process as a pickle, in which a tensor is its place there.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet.model.causal import CausalModel

ALIGN = 64
MEMORY = Path("/dev/shm")
"""Linux's folder of files in memory. In a container it may be too small or missing: then the file is a
temporary one on disk."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor in the file: its offset, form and kind."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class SharedModel:
    """Data that another process needs to map the model."""

    path: Path
    size: int
    pickled: bytes
    places: tuple[SharedTensor, ...]


def share(model: CausalModel) -> SharedModel:
    """Move a model's tensors into a file, where `attach` finds them. The file is the caller's to remove, once all have attached.

    Raises:
        ValueError: if the model is not in the CPU's memory, or it cannot be pickled.
    """
    if model.device.type != "cpu":
        raise ValueError(f"only a model in the CPU's memory can be shared between processes, and this one is on {model.device}")
    packer = _Packer(buffer := io.BytesIO())
    try:
        packer.dump(model)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{type(model.hf).__name__} cannot be handed to another process: {error}") from error
    path = _make_file(packer.size)
    storage = _map(path, packer.size)
    for tensors, place in zip(packer.tensors, packer.places, strict=True):
        with torch.no_grad():
            view = _view(storage, place).copy_(tensors[0])
        for tensor in tensors:
            tensor.data = view
    return SharedModel(path, packer.size, buffer.getvalue(), tuple(packer.places))


def attach(shared: SharedModel) -> CausalModel:
    """The same model, over the same memory.

    Raises:
        OSError: if the file is not there.
    """
    storage = _map(shared.path, shared.size)
    return made_of(shared, [_view(storage, place) for place in shared.places])


def made_of(shared: SharedModel, tensors: Sequence[Tensor]) -> CausalModel:
    """The same model, over tensors that have what its places have, or will have."""
    made = [
        nn.Parameter(tensor, requires_grad=place.requires_grad) if place.is_parameter else tensor
        for tensor, place in zip(tensors, shared.places, strict=True)
    ]
    model = _Unpacker(io.BytesIO(shared.pickled), made).load()
    assert isinstance(model, CausalModel)
    return model


class _Packer(pickle.Pickler):
    """Pickles a model without the contents of its tensors; those that are one piece of memory have one place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[list[Tensor]] = []
        self.places: list[SharedTensor] = []
        self.size = 0
        self._known: dict[tuple[Any, ...], int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        key = (obj.data_ptr(), tuple(obj.shape), obj.stride(), obj.dtype) if obj.numel() else (id(obj),)
        if key not in self._known:
            self._known[key] = len(self.places)
            self.places.append(SharedTensor(self.size, tuple(obj.shape), obj.dtype, isinstance(obj, nn.Parameter), obj.requires_grad))
            self.tensors.append([])
            self.size += -(-obj.nbytes // ALIGN) * ALIGN
        index = self._known[key]
        if not any(obj is known for known in self.tensors[index]):
            self.tensors[index].append(obj)
        return index


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[pid]


def _map(path: Path, size: int) -> torch.UntypedStorage:
    os.close(os.open(path, os.O_RDWR))  # torch would make a file that is not there, full of zeros
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def _view(storage: torch.UntypedStorage, place: SharedTensor) -> Tensor:
    count = torch.Size(place.shape).numel()
    flat = torch.empty(0, dtype=place.dtype)
    flat.set_(storage[place.start : place.start + count * flat.element_size()])
    return flat.view(place.shape)


def _make_file(size: int) -> Path:
    """An empty file of this size, in memory if it fits there."""
    in_memory = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > size
    descriptor, name = tempfile.mkstemp(prefix="whet-weights-", dir=MEMORY if in_memory else None)
    try:
        os.truncate(descriptor, size)
    finally:
        os.close(descriptor)
    return Path(name)
