"""Objects of this process that settings name as `whet.here:NAME`: functions that another process cannot import."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

MODULE = "whet.here"
_objects: dict[str, Any] = {}
_lock = threading.Lock()
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def __getattr__(name: str) -> Any:
    """The object of that name."""
    try:
        return _objects[name]
    except KeyError:
        raise AttributeError(name) from None


@contextmanager
def holding(objects: Mapping[str, Any]) -> Iterator[None]:
    """Context in which settings may name these objects.

    Raises:
        ValueError: another run of this process has objects here.
    """
    if not _lock.acquire(blocking=False):
        raise ValueError("another run works in this Python process: wait for its end, or start this one in a process of its own")
    try:
        _objects.update(objects)
        yield
    finally:
        _objects.clear()
        _lock.release()


def is_here(reference: str) -> bool:
    """True for a name of these objects."""
    return reference.startswith(f"{MODULE}:")


def digest(reference: str) -> str:
    """The sha256 of a function's code, of its defaults, and of the plain values that it closes over; of another object, of its type's name.

    Neither lines nor files count, so a cell of a notebook that runs again is the same.
    """
    found = _objects.get(reference.partition(":")[2])
    return hashlib.sha256(_text(found).encode()).hexdigest()


def _text(found: Any) -> str:
    code = getattr(found, "__code__", None)
    if isinstance(code, CodeType):
        cells = [cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell)]
        return repr([_code(code), [_value(value) for value in [*(found.__defaults__ or ()), *cells]]])
    if isinstance(found, type):
        return repr([found.__qualname__, {name: _text(member) for name, member in vars(found).items() if hasattr(member, "__code__")}])
    return f"{type(found).__module__}.{type(found).__qualname__}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _code(code: CodeType) -> list[Any]:
    """A function's instructions, names and constants."""
    constants = [_code(each) if isinstance(each, CodeType) else _value(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, constants]


def _value(value: Any) -> str:
    """A plain value as it is; of any other, its type."""
    if isinstance(value, tuple | list | frozenset):
        return f"{type(value).__name__}({sorted(map(_value, value)) if isinstance(value, frozenset) else list(map(_value, value))})"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__qualname__
