"""Somebody who watches a run of this process, and may end it: the callbacks of a call in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

Seen = Callable[[int, Mapping[str, float]], bool]
"""Called with the number of steps done and their newest values; True: the run is to end here, as if it had come to its end."""


@dataclass(frozen=True, slots=True)
class Watch:
    """The callbacks of a run."""

    on_step: Seen
    on_evaluation: Seen


WATCH: ContextVar[Watch | None] = ContextVar("WATCH", default=None)
"""The watch of the run that this thread starts."""
