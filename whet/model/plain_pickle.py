"""Pickles read as data: what they would call is noted, and nothing is called, imported or changed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_STEPS = 50_000_000
"""Limit on the steps of one pickle: a description of some 800,000 shards has this many."""
ROOM_BYTES, ROOM_PER_BYTE, MAX_ROOM_BYTES = 1 << 24, 44, 1 << 32
"""Memory for what is made: so much, so much more for each byte of the pickle, and the most. Checkpoints take up to 35 for each byte."""


class PickledName(NamedTuple):
    """A name that a pickle imports."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """An object as a pickle describes it."""

    of: PickledName
    args: tuple[Any, ...]
    """Arguments of the call that would make it."""
    state: Any = None
    """State that it would get afterwards."""


@dataclass(slots=True, eq=False)
class PickledDict:
    """A dict as a pickle describes it. The reader compares keys, once their types are known."""

    items: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def named(self, what: str) -> dict[str, Any]:
        """As a dict.

        Raises:
            ValueError: if a key is no string, or there twice.
        """
        out: dict[str, Any] = {}
        for key, value in self.items:
            if type(key) is not str or key in out:
                raise ValueError(f"{what} has a key that is no string, or is there twice: it is damaged")
            out[key] = value
        return out


@dataclass(frozen=True, slots=True)
class Outside:
    """Something that a pickle leaves to its reader (a persistent id)."""

    key: Any


def read_plain(data: bytes, allowed: frozenset[PickledName], *, outside: bool = False) -> Any:
    """Read a pickle.

    Args:
        data: all of it.
        allowed: names that it may use. `Made` objects are of these; a dict subclass that is called
            without arguments gives `PickledDict`.
        outside: True if it may leave objects to its reader.

    Returns:
        None, bool, int, float, str, bytes, tuple and list, exactly of these types, `PickledName`, `Made`,
            `PickledDict`, and `Outside`.

    Raises:
        ValueError: if it is damaged, uses any other name, or does what a pickle of plain data never
            does.
    """
    try:
        return _Machine(data, allowed, outside).run()
    except (IndexError, struct.error) as error:
        raise ValueError(_DAMAGED) from error


_DICTS = frozenset({PickledName("collections", "OrderedDict")})
_DAMAGED = "it is cut short or damaged"
_ODD = "it is damaged, or made to run code"


class _Machine:
    """Runs the part of the pickle language that plain data needs; every other opcode is refused."""

    def __init__(self, data: bytes, allowed: frozenset[PickledName], outside: bool) -> None:
        self._data, self._allowed, self._outside = data, allowed, outside
        self._at = 0
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._room = min(ROOM_BYTES + ROOM_PER_BYTE * len(data), MAX_ROOM_BYTES)

    def run(self) -> Any:
        steps = [_STEPS.get(code, _Machine._refuse) for code in range(256)]
        costs = [_COSTS.get(code, _PLACE_BYTES) for code in range(256)]
        for _ in range(MAX_STEPS):
            code = self._data[self._at]
            self._at += 1
            if code == ord("."):
                if len(self._stack) != 1 or self._marked:
                    raise ValueError(_DAMAGED)
                return self._stack[0]
            self._take_room(costs[code])
            steps[code](self)
        raise ValueError(f"it has over {MAX_STEPS} steps, which no checkpoint needs")

    def _take_room(self, size_bytes: int) -> None:
        self._room -= size_bytes
        if self._room < 0:
            raise ValueError(f"it makes more objects than a checkpoint of its {len(self._data)} bytes needs: {_ODD}")

    def _refuse(self) -> None:
        place = self._at - 1
        raise ValueError(f"it has the opcode {self._data[place]:#04x} at byte {place}, which no checkpoint needs: {_ODD}")

    def _number(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._data, self._at)
        self._at += kind.size
        return value

    def _skip(self, size: int) -> None:
        self._take(size)

    def _push_number(self, kind: struct.Struct) -> None:
        self._stack.append(self._number(kind))

    def _push_text(self, kind: struct.Struct) -> None:
        self._stack.append(self._take(self._number(kind)).decode("utf-8", "surrogatepass"))

    def _push_bytes(self, kind: struct.Struct) -> None:
        self._stack.append(self._take(self._number(kind)))

    def _get(self, kind: struct.Struct) -> None:
        place = self._number(kind)
        if place not in self._memo:
            raise ValueError(_DAMAGED)
        self._stack.append(self._memo[place])

    def _put(self, kind: struct.Struct) -> None:
        self._memo[self._number(kind)] = self._stack[-1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _push_tuple(self, count: int) -> None:
        self._stack.append(tuple(self._pop(count)))

    def _mark(self) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError(_DAMAGED)
        self._at += size
        return self._data[self._at - size : self._at]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise ValueError(_DAMAGED)
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError(_DAMAGED)
        out = self._stack[-count:]
        del self._stack[-count:]
        return out

    def _since_mark(self) -> list[Any]:
        out, self._stack = self._stack, self._marked.pop()
        return out

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number(_BYTE)), "little", signed=True))

    def _tuple(self) -> None:
        items = tuple(self._since_mark())
        self._stack.append(items)

    def _append(self) -> None:
        self._extend(self._pop(1))

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError(f"it appends to what is no list: {_ODD}")
        self._stack[-1].extend(items)

    def _set_item(self) -> None:
        self._set(self._pop(2))

    def _set_items(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not PickledDict or len(items) % 2:
            raise ValueError(f"it sets items of what is no dict: {_ODD}")
        self._take_room(_PAIR_BYTES * (len(items) // 2))
        self._stack[-1].items.extend(zip(items[::2], items[1::2], strict=True))

    def _global(self) -> None:
        self._named(self._line(), self._line())

    def _stack_global(self) -> None:
        self._named(*self._pop(2))

    def _named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError(f"it names what is no text: {_ODD}")
        found = PickledName("pathlib" if module == "pathlib._local" else module, name)  # as Python 3.13 calls it
        if found not in self._allowed:
            raise ValueError(f"it names {module[:80]}.{name[:80]}, which no checkpoint needs: {_ODD}")
        self._stack.append(found)

    def _call(self) -> None:
        of, args = self._pop(2)
        if type(of) is not PickledName or type(args) is not tuple:
            raise ValueError(f"it calls what is no class of a checkpoint: {_ODD}")
        self._stack.append(PickledDict() if of in _DICTS and not args else Made(of, args))

    def _build(self) -> None:
        (state,) = self._pop(1)
        made = self._stack[-1]
        if type(made) is not Made or made.state is not None:
            raise ValueError(f"it changes what is no object of a checkpoint: {_ODD}")
        made.state = state

    def _persistent(self) -> None:
        if not self._outside:
            raise ValueError(f"it leaves something to its reader, which no checkpoint needs: {_ODD}")
        self._stack.append(Outside(*self._pop(1)))


_BYTE, _TWO, _FOUR, _EIGHT, _SIGNED, _FLOAT = (struct.Struct(kind) for kind in ("<B", "<H", "<I", "<Q", "<i", ">d"))
_STEPS: Mapping[int, Callable[[_Machine], None]] = {
    0x80: lambda machine: machine._skip(1),  # PROTO
    0x95: lambda machine: machine._skip(8),  # FRAME
    ord("N"): lambda machine: machine._stack.append(None),
    0x88: lambda machine: machine._stack.append(True),
    0x89: lambda machine: machine._stack.append(False),
    ord("K"): lambda machine: machine._push_number(_BYTE),
    ord("M"): lambda machine: machine._push_number(_TWO),
    ord("J"): lambda machine: machine._push_number(_SIGNED),
    ord("G"): lambda machine: machine._push_number(_FLOAT),
    0x8A: _Machine._long,
    0x8C: lambda machine: machine._push_text(_BYTE),
    ord("X"): lambda machine: machine._push_text(_FOUR),
    0x8D: lambda machine: machine._push_text(_EIGHT),
    ord("C"): lambda machine: machine._push_bytes(_BYTE),
    ord("B"): lambda machine: machine._push_bytes(_FOUR),
    0x8E: lambda machine: machine._push_bytes(_EIGHT),
    ord("h"): lambda machine: machine._get(_BYTE),
    ord("j"): lambda machine: machine._get(_FOUR),
    ord("q"): lambda machine: machine._put(_BYTE),
    ord("r"): lambda machine: machine._put(_FOUR),
    0x94: _Machine._memoize,
    ord("("): _Machine._mark,
    ord(")"): lambda machine: machine._stack.append(()),
    0x85: lambda machine: machine._push_tuple(1),
    0x86: lambda machine: machine._push_tuple(2),
    0x87: lambda machine: machine._push_tuple(3),
    ord("t"): _Machine._tuple,
    ord("]"): lambda machine: machine._stack.append([]),
    ord("a"): _Machine._append,
    ord("e"): _Machine._appends,
    ord("}"): lambda machine: machine._stack.append(PickledDict()),
    ord("s"): _Machine._set_item,
    ord("u"): _Machine._set_items,
    ord("c"): _Machine._global,
    0x93: _Machine._stack_global,
    ord("R"): _Machine._call,
    0x81: _Machine._call,  # NEWOBJ
    ord("b"): _Machine._build,
    ord("Q"): _Machine._persistent,
}
"""The opcodes of plain data."""
_PLACE_BYTES, _PAIR_BYTES = 16, 72
_COSTS: Mapping[int, int] = {
    **dict.fromkeys(b"MJG\x8a", 48),  # numbers
    **dict.fromkeys(b"X\x8c\x8dCB\x8e", 72),  # texts and bytes
    **dict.fromkeys(b"\x85\x86\x87t", 72),  # tuples
    **dict.fromkeys(b"](", 80),  # lists
    ord("a"): 48,
    **dict.fromkeys(b"}R\x81", 128),  # dicts and objects
    **dict.fromkeys(b"qr\x94c\x93", 112),  # the memo, and names
    ord("Q"): 64,
}
"""Memory that an opcode takes at most, in bytes; the others take a place on the stack and in what it becomes a part of."""
