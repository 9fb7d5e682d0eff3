"""Torch's distributed checkpoints (DCP) read as data: nothing is unpickled, and every entry must be exactly a tensor's."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.model.dcp_slice import DTYPES, read_slice
from whet.model.plain_pickle import Made, PickledDict, PickledName, read_plain
from whet.observe.inside import is_file_inside, open_inside

META = ".metadata"
MAX_META_BYTES = 1 << 29
"""Size limit of a description; a shard takes some 250 bytes."""
MAX_PARTED = 4
"""Dimensions in which a tensor is cut into parts."""
SEEN_S = 10.0
"""For a file that another machine has written to be seen on this one."""
_TORCH, _OLDER = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata"
_METADATA, _TENSOR = PickledName(_TORCH, "Metadata"), PickledName(_TORCH, "TensorStorageMetadata")
_BYTES = PickledName(_TORCH, "BytesStorageMetadata")
_CHUNK, _INDEX = PickledName(_TORCH, "ChunkStorageMetadata"), PickledName(_TORCH, "MetadataIndex")
_STORED = PickledName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_PROPERTIES = (PickledName(_TORCH, "TensorProperties"), PickledName(_OLDER, "TensorProperties"))  # the latter until torch 2.2
_FORMATS = (PickledName(_TORCH, "_MEM_FORMAT_ENCODING"), PickledName(_OLDER, "MEM_FORMAT_ENCODING"))
_FORMAT_NAMES = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_GETATTR = PickledName("builtins", "getattr")
_SIZE, _LAYOUT = PickledName("torch", "Size"), PickledName("torch.serialization", "_get_layout")
ALLOWED = frozenset(
    {
        *(_METADATA, _TENSOR, _BYTES, _CHUNK, _INDEX, _STORED, *_PROPERTIES, *_FORMATS, _GETATTR, _SIZE, _LAYOUT),
        *(PickledName(_TORCH, "StorageMeta"), PickledName("collections", "OrderedDict")),
        *(PickledName("pathlib", f"{kind}Path") for kind in ("Posix", "Windows")),
        *(PickledName("torch", name) for name in DTYPES),
    }
)
"""Names that a description may use."""

Sizes = tuple[int, ...]
Bounds = list[tuple[int, int]]
"""From and to in each dimension."""
_ODD = "it is damaged, or made to mislead"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor, and where its bytes lie."""

    offsets: Sizes
    sizes: Sizes
    file: str
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    size: Sizes
    chunks: tuple[StoredChunk, ...]
    """Those that have elements."""


class DcpFiles:
    """The tensors of a checkpoint that others may have made.

    Args:
        folder: folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors by name.

        Raises:
            ValueError: if the description cannot be read, names what no checkpoint needs, or describes anything but tensors whose parts lie
                in files of the folder.
            OSError: if it is not there.
        """
        with open_inside(self.folder, META) as file:
            data = file.read(MAX_META_BYTES + 1)
        try:
            if len(data) > MAX_META_BYTES:
                raise ValueError(f"it has over {MAX_META_BYTES} bytes")
            return _entries(read_plain(data, ALLOWED))
        except ValueError as error:
            raise ValueError(f"{self.folder / META} cannot be read: {error}") from error

    def read(self, name: str) -> Tensor:
        """One whole tensor, written by any number of ranks.

        Raises:
            ValueError: if a file is missing or damaged.
        """
        entry = self.entries[name]
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) < math.prod(entry.size):  # before memory is taken for it
            raise ValueError(f"{self.folder}: {name} cannot be read: its parts leave something out")
        try:
            out = torch.empty(entry.size, dtype=entry.dtype)
        except RuntimeError as error:
            raise ValueError(f"{self.folder}: {name} cannot be read: {error}") from error
        self.read_into(name, out, (0,) * len(entry.size))
        return out

    def read_into(self, name: str, part: Tensor, offsets: Sequence[int]) -> None:
        """Read a part of a tensor.

        Args:
            name: name of the tensor.
            part: filled; as large as the part.
            offsets: begin of the part in each dimension.

        Raises:
            ValueError: if a file is missing or damaged, or the parts that were saved leave something out.
        """
        entry = self.entries[name]
        end = [begin + size for begin, size in zip(offsets, part.shape, strict=True)]
        try:
            found = [(chunk, common) for chunk in entry.chunks if (common := _common(chunk, offsets, end)) is not None]
            if not _fill([common for _, common in found], list(zip(offsets, end, strict=True))):
                raise ValueError("its parts leave something out, or overlap")
            for chunk, common in found:
                saved = self._chunk(chunk, entry.dtype)
                source = saved[tuple(slice(low - at, high - at) for (low, high), at in zip(common, chunk.offsets, strict=True))]
                part[tuple(slice(low - at, high - at) for (low, high), at in zip(common, offsets, strict=True))].copy_(source)
        except (ValueError, OSError, RuntimeError) as error:  # torch's own, of memory that there is not
            raise ValueError(f"{self.folder}: {name} cannot be read: {error}") from error

    def _chunk(self, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        with open_inside(self.folder, chunk.file) as file:
            return read_slice(file, chunk.begin, chunk.length, dtype, chunk.sizes)

    def check_there(self) -> None:
        """See that what the ranks of a job have written is here, all of it.

        Raises:
            OSError: naming what is not: a rank has written it to another file system.
        """
        names = sorted({chunk.file for entry in self.entries.values() for chunk in entry.chunks})
        deadline = time.monotonic() + SEEN_S
        while lacking := [name for name in names if not is_file_inside(self.folder, name)]:
            if time.monotonic() > deadline:
                raise OSError(
                    f"{self.folder} lacks {len(lacking)} of {len(names)} files that the ranks have written, among them {lacking[0]}: "
                    "run_dir must be on a file system that all of them share"
                )
            time.sleep(0.2)


def _common(chunk: StoredChunk, begin: Sequence[int], end: Sequence[int]) -> Bounds | None:
    """Intersection of a chunk and a part: begin and end in each dimension."""
    dims = zip(chunk.offsets, chunk.sizes, begin, end, strict=True)
    common = [(max(at, low), min(at + size, high)) for at, size, low, high in dims]
    return common if all(low < high for low, high in common) else None


def _fill(boxes: list[Bounds], whole: Bounds) -> bool:
    """True if boxes fill another one, each place once: that is so if their corners, with signs, are
    those of the whole.

    Raises:
        ValueError: if they divide it in more dimensions than `MAX_PARTED`.
    """
    parted = [i for i, side in enumerate(whole) if any(box[i] != side for box in boxes)]
    if len(parted) > MAX_PARTED:
        raise ValueError(f"it is parted in {len(parted)} dimensions, and at most {MAX_PARTED} are read")
    left: Counter[tuple[int, ...]] = Counter()
    for box, sign in (*((box, 1) for box in boxes), (whole, -1)):
        if any(low == high for low, high in box):
            continue
        for ends in product((0, 1), repeat=len(parted)):
            left[tuple(box[i][end] for i, end in zip(parted, ends, strict=True))] += sign * (-1) ** sum(ends)
    return not any(left.values())


def _entries(found: Any) -> dict[str, Entry]:
    whole = _state(found, _METADATA, "the checkpoint")
    if type(whole.get("state_dict_metadata")) is not PickledDict or type(whole.get("storage_data")) is not PickledDict:
        raise ValueError("it describes no checkpoint")
    stored = _stored(whole["storage_data"])
    out = {name: _entry(name, entry, stored) for name, entry in whole["state_dict_metadata"].named("the checkpoint").items()}
    _check_apart([chunk for entry in out.values() for chunk in entry.chunks])
    return out


def _stored(pairs: PickledDict) -> dict[tuple[str, Sizes | None], tuple[str, int, int]]:
    """File, begin and length of each part, by the tensor's name and the part's offsets in it."""
    out: dict[tuple[str, Sizes | None], tuple[str, int, int]] = {}
    for key, value in pairs.items:
        index, info = _state(key, _INDEX, "a place"), _state(value, _STORED, "a place")
        name, offset = index.get("fqn"), index.get("offset")
        file, begin, length = (info.get(each) for each in ("relative_path", "offset", "length"))
        if type(name) is not str or type(file) is not str or type(begin) is not int or type(length) is not int or min(begin, length) < 0:
            raise ValueError(f"a place is no name, file and numbers: {_ODD}")
        if file in ("", ".", "..", META) or set(file) & set("/\\\0"):
            raise ValueError(f"it names the file {file[:200]!r}, which is not in its folder")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name} was changed by an extension when it was written, and cannot be read")
        out[name, None if offset is None else _sizes(offset, name)] = file, begin, length
    return out


def _entry(name: str, found: Any, stored: Mapping[tuple[str, Sizes | None], tuple[str, int, int]]) -> Entry:
    if type(found) is not Made or found.of != _TENSOR:
        raise ValueError(f"{name!r} is no tensor, and nothing else is read from checkpoints: save it with tensors alone")
    state = _state(found, _TENSOR, name)
    dtype, size, parts = _dtype(state.get("properties"), name), _sizes(state.get("size"), name), state.get("chunks")
    if type(parts) is not list:
        raise ValueError(f"{name!r} has no list of parts: {_ODD}")
    chunks: list[StoredChunk] = []
    for part in parts:
        place = _state(part, _CHUNK, name)
        offsets, sizes = _sizes(place.get("offsets"), name), _sizes(place.get("sizes"), name)
        if not len(offsets) == len(sizes) == len(size) or any(at + n > end for at, n, end in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"{name!r} has a part that does not lie in it: {_ODD}")
        if not math.prod(sizes):
            continue
        if (name, offsets) not in stored:
            raise ValueError(f"{name!r} has a part of which no file is named: it is damaged")
        chunk = StoredChunk(offsets, sizes, *stored[name, offsets])
        if math.prod(sizes) * dtype.itemsize > chunk.length:
            raise ValueError(f"{name!r} has a part that is larger than its place in {chunk.file}: {_ODD}")
        chunks.append(chunk)
    return Entry(dtype, size, tuple(chunks))


def _check_apart(chunks: list[StoredChunk]) -> None:
    """So that no tensors take more memory than their files do."""
    ends: dict[str, int] = {}
    for chunk in sorted(chunks, key=lambda each: (each.file, each.begin)):
        if chunk.begin < ends.get(chunk.file, 0):
            raise ValueError(f"it has two parts at one place of {chunk.file}: {_ODD}")
        ends[chunk.file] = chunk.begin + chunk.length


def _state(found: Any, of: PickledName, what: str) -> dict[str, Any]:
    if type(found) is not Made or found.of != of or type(found.state) is not PickledDict:
        raise ValueError(f"{what!r} is described by no {of.name}: {_ODD}")
    return found.state.named(what)


def _sizes(found: Any, what: str) -> Sizes:
    if type(found) is Made and found.of == _SIZE and len(found.args) == 1 and _counts(found.args[0]):
        return found.args[0]
    raise ValueError(f"{what!r} has sizes that are no torch.Size: {_ODD}")


def _counts(values: Any) -> bool:
    return type(values) is tuple and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _dtype(found: Any, what: str) -> torch.dtype:
    state = found.state if type(found) is Made and found.of in _PROPERTIES else None
    if type(state) is not tuple or len(state) != 5 or type(state[0]) is not PickledName or state[0].module != "torch":
        raise ValueError(f"{what!r} is described by no TensorProperties: {_ODD}")
    dtype, layout, _, memory_format, _ = state
    if dtype.name not in DTYPES:
        raise ValueError(f"{what!r} is described by no TensorProperties: {_ODD}")
    if type(layout) is not Made or layout.of != _LAYOUT or layout.args != ("torch.strided",):
        raise ValueError(f"{what!r} is a sparse tensor, which is not read")
    if type(memory_format) is not Made or not _is_format(memory_format):
        raise ValueError(f"{what!r} asks for what no checkpoint needs: it is damaged, or made to run code")
    return DTYPES[dtype.name]


def _is_format(found: Made) -> bool:
    """True for a member of the one enum that a description has: until 3.11.3 Python pickled members as
    attributes of it."""
    if found.of == _GETATTR:
        owner, name = found.args if len(found.args) == 2 else (None, None)
        return type(owner) is PickledName and owner in _FORMATS and type(name) is str and name in _FORMAT_NAMES
    return found.of in _FORMATS and len(found.args) == 1 and type(found.args[0]) is int
