"""The experts that tokens of a mixture went to: a few small numbers for each token and layer, in one block of memory.

Standard library only. With 8 experts in each of 48 layers a token takes 384 bytes; in models of more than 255 experts twice that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

CODES = {1: "B", 2: "h"}
"""Types of an entry by its bytes, as in Python's `array`. Two bytes have a sign, since torch computes little without one."""
DTYPES = {1: "uint8", 2: "int16"}
SMALL = 255
"""Experts that one byte can tell apart."""


def entry_bytes(num_experts: int) -> int:
    """Bytes of an entry, by the number of experts of a layer."""
    return 1 if num_experts <= SMALL else 2


class Routes(Sequence[bytes]):
    """Chosen experts, token after token. An entry is an expert's number plus 1; 0: unknown.

    Args:
        data: entries [tokens, layers, top_k], whose memory is shared: it must not be written to any more.
        layers: layers with a router.
        top_k: experts of a token in a layer.
        itemsize: bytes of an entry.

    Raises:
        ValueError: if the data are not of whole tokens.
    """

    __slots__ = ("_length", "data", "itemsize", "layers", "top_k")

    def __init__(self, data: bytes | memoryview = b"", layers: int = 0, top_k: int = 0, itemsize: int = 1) -> None:
        view: Any = memoryview(data)
        self.data: memoryview = view.cast("B").toreadonly() if len(view) else memoryview(b"")
        """The memory of the entries."""
        self.layers, self.top_k, self.itemsize = layers, top_k, itemsize
        if itemsize not in CODES or len(self.data) % (self.width or len(self.data) or 1):
            raise ValueError(f"{len(self.data)} bytes are not whole tokens of {layers} layers x {top_k} experts x {itemsize} bytes")
        if len(self.data) and not self.width:
            raise ValueError(f"{len(self.data)} bytes of tokens without layers")
        self._length = len(self.data) // self.width if self.width else 0

    @classmethod
    def unknown(cls, length: int) -> Routes:
        """Tokens of which nobody tells anything, in a model of any shape."""
        out = cls()
        out._length = length
        return out

    @classmethod
    def join(cls, parts: Iterable[Routes]) -> Routes:
        """Tokens one after another, in new memory; a single part as it is.

        Raises:
            ValueError: if they are of models of different shapes.
        """
        pieces = list(parts)
        if len(pieces) == 1:
            return pieces[0]
        shapes = {(each.layers, each.top_k) for each in pieces if each.width}
        if len(shapes) > 1:
            raise ValueError(f"chosen experts of models of different shapes (layers, experts of a token): {sorted(shapes)}")
        if not shapes:
            return cls.unknown(sum(map(len, pieces)))
        (shape,) = shapes
        itemsize = max(each.itemsize for each in pieces if each.width)
        return cls(b"".join(each._entries(shape, itemsize) for each in pieces), *shape, itemsize)

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return self.layers * self.top_k * self.itemsize

    def numpy(self) -> Any:
        """The entries as an array that cannot be written to. [tokens, layers, top_k] uint8 or int16"""
        import numpy

        return numpy.frombuffer(self.data, DTYPES[self.itemsize]).reshape(self._length if self.width else 0, self.layers, self.top_k)

    def _entries(self, shape: tuple[int, int], itemsize: int) -> bytes | memoryview:
        """The memory of the same entries in a model of a shape, with that many bytes each."""
        if not self.width:
            return bytes(self._length * shape[0] * shape[1] * itemsize)
        if self.itemsize == itemsize:
            return self.data
        small: Any = self.data
        numbers: list[int] = small.cast(CODES[self.itemsize]).tolist()
        return array(CODES[itemsize], numbers).tobytes()

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Routes: ...
    def __getitem__(self, index: int | slice) -> bytes | Routes:
        """A token's entries; of a slice the tokens in it, which share this memory."""
        if not isinstance(index, slice):
            place = range(self._length)[index]
            return self.data[place * self.width : (place + 1) * self.width].tobytes()
        chosen = range(self._length)[index]
        if chosen.step != 1:
            return Routes.join([self[place : place + 1] for place in chosen])
        if not self.width:
            return Routes.unknown(len(chosen))
        return Routes(self.data[chosen.start * self.width : chosen.stop * self.width], self.layers, self.top_k, self.itemsize)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Routes):
            return NotImplemented
        if len(self) != len(other) or (self.layers, self.top_k) != (other.layers, other.top_k):
            return False
        shape, itemsize = (self.layers, self.top_k), max(self.itemsize, other.itemsize)
        return self._entries(shape, itemsize) == other._entries(shape, itemsize)

    def __hash__(self) -> int:
        return hash((self._length, self.layers, self.top_k))

    def __repr__(self) -> str:
        return f"<Routes of {self._length} tokens: {self.layers} layers x {self.top_k} experts>"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if not self.width:
            return Routes.unknown, (self._length,)
        return Routes, (self.data.tobytes(), self.layers, self.top_k, self.itemsize)
