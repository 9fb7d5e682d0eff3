"""The messages of calls between processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.config import place_of


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A call of an object in another process."""

    target: str
    """Name of the object."""
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    number: int | None = None
    """Number that the answers repeat; None: no answer is wanted, or calls are made one at a time."""
    timeout_s: float | None = None
    """Seconds after which the caller ends the process that it called; None: it waits."""


@dataclass(frozen=True, slots=True)
class CancelCall:
    """The end of a call that nobody waits for any more."""

    number: int


@dataclass(frozen=True, slots=True)
class RemoteResult:
    """An answer: a call's value, or one of several."""

    value: Any = None
    number: int | None = None
    more: bool = False
    """True if another answer of the same call follows."""


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """The answer of a call that raised an error."""

    kind: str
    """Name of the error's class."""
    message: str
    cause: str
    """Class and message of the error's cause, in parentheses; empty: it has none."""
    place: str
    """Line of a user's code that raised it, in words; empty: none did."""
    traceback: str
    """Traceback in the process that was called."""
    number: int | None = None


def whole_traceback(error: BaseException) -> str:
    """An error and all frames that it passed."""
    return "".join(traceback.format_exception(error))


def answer_of(error: Exception, traceback_of: Callable[[BaseException], str] = whole_traceback, number: int | None = None) -> RemoteFailure:
    """The answer of a call that raised `error`."""
    cause = "" if error.__cause__ is None else f" ({type(error.__cause__).__name__}: {error.__cause__})"
    return RemoteFailure(type(error).__name__, str(error), cause, place_of(error), traceback_of(error), number)
