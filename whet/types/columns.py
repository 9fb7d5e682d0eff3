"""Columns: numbers of many tokens in one block of memory, immutable, read like tuples. Standard library only.

A column costs 4 or 8 bytes a token, or a few bytes for each run of equal values. It has a length, items, slices (which
share its memory), and equality with any sequence of the same numbers. `tolist()` gives Python's numbers, `numpy()` an
array that shares its memory.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby, pairwise, repeat
from typing import Any, ClassVar, Generic, Self, SupportsIndex, TypeVar, cast, overload

T = TypeVar("T")
U = TypeVar("U")


SHOWN = 32
"""Items up to which a column is written out in messages."""


class _View(Sequence[T]):
    """Equality, hash and sums of columns: those of a tuple of their items."""

    __slots__ = ()

    @abstractmethod
    def tolist(self) -> list[T]:
        """The items, as Python's numbers."""

    @abstractmethod
    def numpy(self) -> Any:
        """The items as a numpy array that cannot be written to."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        found = self.numpy()
        if dtype is not None and found.dtype != dtype:
            return found.astype(dtype)
        return found.copy() if copy else found

    def __iter__(self) -> Iterator[T]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        items = cast(Sequence[Any], other)
        return len(self) == len(items) and all(a == b for a, b in zip(self, items, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        if len(self) <= SHOWN:
            return repr(tuple(self))
        return f"<{type(self).__name__} of {len(self)}: {', '.join(map(repr, self[:3]))}, ...>"


class Column(_View[T]):
    """Numbers of one type, side by side.

    Args:
        items: numbers, or a buffer of the column's own type (an array, a numpy array), whose memory is shared: it must not be
            written to any more.

    Raises:
        ValueError: an item is not a number that the type can hold.
    """

    __slots__ = ("_view",)
    code: ClassVar[str]
    """The type's code, as in Python's `array` and `memoryview`."""
    itemsize: ClassVar[int]
    """Bytes of an item."""
    _dtype: ClassVar[str]

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._view = self._view_of(items)

    @classmethod
    def of(cls, items: Iterable[T]) -> Self:
        """The items themselves if they are such a column already, else a new column."""
        return items if type(items) is cls else cls(items)

    @classmethod
    def frombytes(cls, data: bytes) -> Self:
        """A column of the memory of its items, as `tobytes` gives it."""
        if not data:
            return cls()
        view: Any = memoryview(data)
        return cls._of_view(view.cast(cls.code))

    @classmethod
    def _of_view(cls, view: Any) -> Self:
        """A column of memory of its own type that nobody writes to."""
        out = cls.__new__(cls)
        out._view = view
        return out

    @classmethod
    def zeros(cls, length: int) -> Self:
        """A column of zeros."""
        return cls.frombytes(bytes(length * cls.itemsize))

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """Columns one after another, in new memory; a single one as it is."""
        columns = list(parts)
        return columns[0] if len(columns) == 1 else cls.frombytes(b"".join(column._view for column in columns))

    def _view_of(self, items: Iterable[Any]) -> memoryview[Any]:
        buffer: Any = items
        if isinstance(items, Column):
            buffer = items.view if items.code == self.code else items.tolist()
        try:
            view = memoryview(buffer)
        except TypeError:
            view = None
        if view is not None and view.format == self.code and view.ndim == 1 and view.c_contiguous:
            return view.toreadonly()
        numbers: Any = buffer if view is None else view.tolist()
        try:
            return memoryview(array(self.code, numbers)).toreadonly()
        except (TypeError, OverflowError) as error:
            raise ValueError(f"a column of {self._dtype} cannot hold this: {error}") from error

    @property
    def view(self) -> memoryview[Any]:
        """The memory of the items, in the type's own format."""
        return self._view

    def tobytes(self) -> bytes:
        return self._view.tobytes()

    def tolist(self) -> list[T]:
        items: list[Any] = self._view.tolist()
        return items

    def numpy(self) -> Any:
        import numpy

        return numpy.frombuffer(self._view, self._dtype)

    def __len__(self) -> int:
        return len(self._view)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> T | Self:
        if not isinstance(index, slice):
            return self._view[index]
        part: Any = self._view[index]
        return self._of_view(part) if index.step in (None, 1) else type(self)(part.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        items = cast(Sequence[Any], other)
        try:
            return len(self) == len(items) and self._view == self._view_of(items)
        except ValueError:
            return False

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Iterable[T]) -> Self:
        return self.join([self, self.of(other)])

    def __radd__(self, other: Iterable[T]) -> Self:
        return self.join([self.of(other), self])

    def __reduce__(self) -> tuple[Callable[[bytes], Self], tuple[bytes]]:
        return self.frombytes, (self.tobytes(),)


class Ints(Column[int]):
    """Token ids and other whole numbers of 32 bits."""

    __slots__ = ()
    code, itemsize, _dtype = "i", 4, "int32"


class Floats(Column[float]):
    """Log-probs and other numbers of 32 bits. Compared with Python's numbers, these are rounded to 32 bits first."""

    __slots__ = ()
    code, itemsize, _dtype = "f", 4, "float32"


class Doubles(Column[float]):
    """Rewards: numbers as Python has them."""

    __slots__ = ()
    code, itemsize, _dtype = "d", 8, "float64"


C = TypeVar("C", bound=Column[Any])


class Growing(Generic[C]):
    """A column that grows.

    Args:
        kind: the column's type.
        items: what it begins with.
    """

    __slots__ = ("_data", "_kind")

    def __init__(self, kind: type[C], items: Collection[Any] = ()) -> None:
        self._kind: type[C] = kind
        self._data = bytearray()
        if items:
            self.extend(items)

    def extend(self, items: Iterable[Any]) -> None:
        self._data += self._kind.of(items).view

    def clear(self) -> None:
        self._data.clear()

    def column(self) -> C:
        """The items so far, in memory of their own."""
        return self._kind.frombytes(bytes(self._data))

    def __len__(self) -> int:
        return len(self._data) // self._kind.itemsize


class Runs(_View[T]):
    """Values of which neighbours are mostly equal: each run's value and length.

    Args:
        items: the values one by one.
    """

    __slots__ = ("_ends", "_values")

    def __init__(self, items: Iterable[T] = ()) -> None:
        array_of: Any = items
        if hasattr(array_of, "tolist"):  # an array's own numbers are no Python numbers
            items = array_of.tolist()
        counted = [(value, sum(1 for _ in same)) for value, same in groupby(items)]
        self._values: tuple[T, ...] = tuple(value for value, _ in counted)
        self._ends: tuple[int, ...] = tuple(accumulate(count for _, count in counted))

    @classmethod
    def of(cls, items: Iterable[T]) -> Runs[T]:
        """The items themselves if they are runs already, else new runs."""
        return items if isinstance(items, Runs) else cls(items)

    @classmethod
    def from_runs(cls, runs: Iterable[tuple[T, int]]) -> Runs[T]:
        """Runs of (value, length); those of length 0 are left out, equal neighbours become one."""
        values: list[T] = []
        lengths: list[int] = []
        for value, length in runs:
            if length and values and values[-1] == value:
                lengths[-1] += length
            elif length:
                values.append(value)
                lengths.append(length)
        out = cls()
        out._values, out._ends = tuple(values), tuple(accumulate(lengths))
        return out

    @classmethod
    def repeat(cls, value: T, length: int) -> Runs[T]:
        """One value."""
        return cls.from_runs([(value, length)])

    @classmethod
    def join(cls, parts: Iterable[Runs[T]]) -> Runs[T]:
        """Runs one after another."""
        return cls.from_runs(chain.from_iterable(part.runs() for part in parts))

    def runs(self) -> list[tuple[T, int]]:
        """Each run's value and length."""
        return list(zip(self._values, self.lengths, strict=True))

    @property
    def values(self) -> tuple[T, ...]:
        """The value of each run."""
        return self._values

    @property
    def ends(self) -> tuple[int, ...]:
        """The place after each run."""
        return self._ends

    @property
    def lengths(self) -> list[int]:
        """The length of each run."""
        return [end - start for start, end in pairwise((0, *self._ends))]

    def tolist(self) -> list[T]:
        return list(chain.from_iterable(repeat(value, length) for value, length in self.runs()))

    def numpy(self) -> Any:
        import numpy

        out = numpy.repeat(numpy.array(self._values), self.lengths) if self._values else numpy.empty(0)
        out.flags.writeable = False
        return out

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Runs[T]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> T | Runs[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return Runs(self.tolist()[index])
            return Runs[T].from_runs(
                (value, min(end, stop) - max(end - length, start))
                for (value, length), end in zip(self.runs(), self._ends, strict=True)
                if end > start and end - length < stop
            )
        place = range(len(self))[index]
        return self._values[bisect_right(self._ends, place)]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Runs):
            runs = cast(Runs[Any], other)
            return self._ends == runs._ends and self._values == runs._values
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Callable[[Iterable[tuple[T, int]]], Runs[T]], tuple[list[tuple[T, int]]]]:
        return _runs, (self.runs(),)


def _runs(runs: Iterable[tuple[T, int]]) -> Runs[T]:
    out: Any = Runs.from_runs(runs)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return out


def in_step(one: Runs[T], other: Runs[U]) -> Iterator[tuple[T, U, int]]:
    """Runs in which both keep their values: (value of one, value of the other, length).

    Raises:
        ValueError: they differ in length.
    """
    if len(one) != len(other):
        raise ValueError(f"runs of {len(one)} and of {len(other)} items")
    a, b, start = 0, 0, 0
    while start < len(one):
        end = min(one.ends[a], other.ends[b])
        yield one.values[a], other.values[b], end - start
        a, b, start = a + (one.ends[a] == end), b + (other.ends[b] == end), end


def num_true(mask: Runs[bool]) -> int:
    """Number of items that are set."""
    return sum(length for value, length in mask.runs() if value)


class Ragged(_View[bytes]):
    """A few ids for each token: `ragged[t]` is token t's ids as int32, one after another.

    Args:
        items: the ids of each token.
    """

    __slots__ = ("counts", "ids")

    def __init__(self, items: Iterable[bytes] = ()) -> None:
        rows = list(items)
        self.ids: Ints = Ints.frombytes(b"".join(rows))
        """The ids of all tokens, token after token."""
        self.counts: Ints = Ints(len(row) // 4 for row in rows)
        """Number of ids of each token."""

    @classmethod
    def of(cls, items: Iterable[bytes]) -> Ragged:
        """The items themselves if they are ragged already, else a new column."""
        return items if isinstance(items, Ragged) else cls(items)

    @classmethod
    def of_parts(cls, counts: Ints, ids: Ints) -> Ragged:
        """A column of its counts and ids.

        Raises:
            ValueError: they don't fit together.
        """
        if sum(counts) != len(ids) or min(counts, default=0) < 0:
            raise ValueError(f"counts of {sum(counts)} ids for {len(ids)} of them")
        out = cls()
        out.counts, out.ids = counts, ids
        return out

    @classmethod
    def join(cls, parts: Iterable[Ragged]) -> Ragged:
        """Columns one after another."""
        parts = list(parts)
        return cls.of_parts(Ints.join(part.counts for part in parts), Ints.join(part.ids for part in parts))

    @classmethod
    def empty(cls, length: int) -> Ragged:
        """No ids for any of `length` tokens."""
        return cls.of_parts(Ints.zeros(length), Ints())

    def tolist(self) -> list[bytes]:
        data, ends = self.ids.view.cast("B"), list(accumulate(self.counts, initial=0))
        return [data[4 * start : 4 * end].tobytes() for start, end in pairwise(ends)]

    def numpy(self) -> Any:
        """An array of the ids of all tokens, token after token; `counts` says how many each token has."""
        return self.ids.numpy()

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> bytes | Ragged:
        found = self.tolist()[index]
        return found if isinstance(found, bytes) else Ragged(found)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ragged):
            return self.counts == other.counts and self.ids == other.ids
        return super().__eq__(other)

    def __reduce__(self) -> tuple[Callable[[Ints, Ints], Ragged], tuple[Ints, Ints]]:
        return Ragged.of_parts, (self.counts, self.ids)


Columns = Mapping[str, type[Ints | Floats | Doubles | Runs[Any] | Ragged]]
"""Types of a record's columns, by field."""


def to_columns(record: object, columns: Columns) -> None:
    """Make columns of the named fields of a frozen record that is being made; None stays None.

    Raises:
        ValueError: naming the field, where its items don't fit its type.
    """
    for name, kind in columns.items():
        items = getattr(record, name)
        if items is None or type(items) is kind:
            continue
        try:
            object.__setattr__(record, name, kind(items))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} of a {type(record).__name__.lower()}: {error}") from error
