"""One tensor as `torch.save` writes it, found in a file and read without unpickling."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from io import BufferedReader, RawIOBase
from typing import Any

import torch
from torch import Tensor

from whet.model.plain_pickle import Made, Outside, PickledDict, PickledName, read_plain

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    )
}
"""Types of tensors that are read, by torch's names."""
_STORAGES: Mapping[PickledName, torch.dtype] = {
    PickledName("torch", f"{name}Storage"): dtype
    for name, dtype in {
        **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16, "Bool": torch.bool},
        **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
        **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
    }.items()
}
_TYPED, _UNTYPED = PickledName("torch._utils", "_rebuild_tensor_v2"), PickledName("torch._utils", "_rebuild_tensor_v3")
_BYTES = PickledName("torch.storage", "UntypedStorage")
_DTYPES = frozenset(PickledName("torch", name) for name in DTYPES)
_ALLOWED = frozenset({*_STORAGES, *_DTYPES, _TYPED, _UNTYPED, _BYTES, PickledName("collections", "OrderedDict")})
_HEADER_BYTES = 1 << 20
"""Size limit of a tensor's description."""


def read_slice(file: BufferedReader, offset: int, length: int, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
    """Read a tensor.

    Args:
        file: file that holds it, with others.
        offset: its first byte.
        length: number of bytes that describe and hold it.
        dtype: type that it must have.
        sizes: sizes that it must have.

    Raises:
        ValueError: if it is damaged, has another type or other sizes, or is more than a tensor.
    """
    window = _Window(file, offset, length)
    try:
        members = {each.filename: each for each in zipfile.ZipFile(window).filelist}
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"what lies at byte {offset} is no tensor that torch.save wrote ({error})") from error
    prefix = next(iter(members), "").partition("/")[0]
    saved = read_plain(_member(window, members, f"{prefix}/data.pkl"), _ALLOWED, outside=True)
    key, count, start, strides = _described(saved, dtype, tuple(sizes))
    if f"{prefix}/byteorder" in members and _member(window, members, f"{prefix}/byteorder") != b"little":
        raise ValueError("its bytes are in big-endian order, which is not read")
    data = members.get(f"{prefix}/data/{key}")
    if data is None or data.file_size != count * dtype.itemsize:
        raise ValueError("it lacks its data, or has other than as many bytes as it says")
    held = torch.empty(data.file_size, dtype=torch.uint8)
    window.fill(held.numpy().data, _place(window, data))
    return held.view(dtype).as_strided(tuple(sizes), strides, start)


def _described(saved: Any, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[str, int, int, tuple[int, ...]]:
    """The key of the data, how many elements it has, where the tensor begins among them, and its strides."""
    no_tensor = ValueError(f"it is no plain tensor of {dtype}, and nothing else is read")
    if type(saved) is not Made or saved.state is not None or len(saved.args) < 6:
        raise no_tensor
    storage, start, shape, strides, _, hooks, *rest = saved.args
    is_storage = type(storage) is Outside and type(storage.key) is tuple and len(storage.key) == 5
    if not is_storage or type(hooks) is not PickledDict or hooks.items:
        raise no_tensor
    tag, kind, key, _, count = storage.key
    if type(tag) is not str or tag != "storage" or type(kind) is not PickledName or type(key) is not str:
        raise no_tensor
    if saved.of == _TYPED:
        found = _STORAGES.get(kind)
    elif saved.of == _UNTYPED and kind == _BYTES and rest and type(rest[0]) is PickledName:
        found = DTYPES.get(rest.pop(0).name)
        count = count // dtype.itemsize if type(count) is int else count
    else:
        raise no_tensor
    if found != dtype or any(part is not None for part in rest):  # such as a conjugate
        raise no_tensor
    if not _whole(shape) or not _whole(strides) or not _whole((start, count)) or len(shape) != len(strides) or shape != sizes:
        raise ValueError(f"it has not the sizes {sizes}")
    last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if math.prod(shape) > count or (math.prod(shape) and last >= count):
        raise ValueError("it reaches beyond its data")
    return key, count, start, strides


def _whole(values: Any) -> bool:
    return type(values) is tuple and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _member(window: _Window, members: Mapping[str, zipfile.ZipInfo], name: str) -> bytes:
    found = members.get(name)
    if found is None or found.file_size > _HEADER_BYTES:
        raise ValueError(f"it lacks {name}, or that is larger than any tensor's")
    out = bytearray(found.file_size)
    window.fill(memoryview(out), _place(window, found))
    return bytes(out)


def _place(window: _Window, member: zipfile.ZipInfo) -> int:
    """Offset of a member's bytes."""
    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size or member.flag_bits & 1:
        raise ValueError(f"{member.filename!r} is compressed or encrypted, which torch.save never does")
    head = bytearray(30)
    window.fill(memoryview(head), member.header_offset)
    if head[:4] != b"PK\3\4":
        raise ValueError(f"{member.filename!r} is not where the index has it")
    return member.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


class _Window(RawIOBase):
    """A part of a file, in which headers are read in small pieces and data into memory that is there."""

    def __init__(self, file: BufferedReader, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = offset + (0, self._at, self._length)[whence]
        if at < 0:
            raise OSError(f"there is no byte {at}")  # as a file says
        self._at = at
        return at

    def read(self, size: int = -1, /) -> bytes:
        size = self._length - self._at if size < 0 else min(size, self._length - self._at)
        if size > _HEADER_BYTES:
            raise ValueError("it is described by more bytes than any tensor is")
        out = bytearray(max(0, size))
        self.fill(memoryview(out), self._at)
        self._at += len(out)
        return bytes(out)

    def fill(self, into: memoryview, at: int) -> None:
        """Read as many bytes as `into` has.

        Raises:
            ValueError: if there are fewer.
        """
        if at < 0 or at + len(into) > self._length:
            raise ValueError("it is cut short, or reaches beyond its place in the file")
        self._file.seek(self._offset + at)
        done = 0
        while done < len(into):
            count = self._file.readinto(into[done:])
            if not count:
                raise ValueError("its file is cut short")
            done += count
