"""The methods that another process may call: the public ones of a protocol or class, and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, TypeVar, get_origin, get_type_hints

from whet.calls.messages import RemoteCall

F = TypeVar("F", bound=Callable[..., Any])
LOCAL = "__whet_local__"
"""Attribute of methods that no other process may call."""
STREAMS = (Iterable, AsyncIterator, AsyncGenerator)


class RefusedCall(Exception):
    """A call of an unknown object, or of a method that its interface does not have."""


class MethodKind(Enum):
    """Kind of a method, by the type that it is declared to return."""

    VALUE = auto()
    STREAM = auto()
    """It gives one value after another."""
    DEFERRED = auto()
    """It returns a function that does the rest."""


def local(method: F) -> F:
    """Decorator of a public method that no other process may call."""
    setattr(method, LOCAL, True)
    return method


@cache
def methods_of(interface: type) -> Mapping[str, MethodKind]:
    """Public methods of a protocol or class, by name. Properties and methods marked `local` are none."""
    functions = {name: value for each in reversed(interface.__mro__) for name, value in vars(each).items() if inspect.isfunction(value)}
    return {name: _kind_of(value) for name, value in functions.items() if not name.startswith("_") and not hasattr(value, LOCAL)}


def _kind_of(method: Callable[..., Any]) -> MethodKind:
    returned = get_origin(get_type_hints(method).get("return"))
    if returned in STREAMS:
        return MethodKind.STREAM
    return MethodKind.DEFERRED if returned is Callable else MethodKind.VALUE


@dataclass(frozen=True, slots=True)
class Target:
    """An object that other processes may call."""

    held: Any
    interface: type
    """Protocol or class whose methods may be called."""


def invoke(targets: Mapping[str, Target], call: RemoteCall) -> tuple[MethodKind, Any]:
    """Make a call. Returns the method's kind, and the result.

    Raises:
        RefusedCall: if no target offers the method; nothing was called.
    """
    target = targets.get(call.target)
    kind = None if target is None else methods_of(target.interface).get(call.method)
    if target is None or kind is None:
        raise RefusedCall(f"another process called {call.target}.{call.method}, which is not offered")
    return kind, getattr(target.held, call.method)(*call.args, **call.kwargs)
