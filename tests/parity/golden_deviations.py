"""The one table of cases that whet answers differently on purpose: why, and what whet answers instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Deviation:
    """A kind of case, the reason, and whet's own right answer."""

    applies: Callable[[str, Mapping[str, Any]], bool]
    """Given the file's stem and the case."""
    why: str
    """The case's `peer_defect`, or the rule that forbids the peer's answer."""
    answer: Callable[[Mapping[str, Any]], Any]
    """The outputs that are right, computed here without whet."""


DEVIATIONS: tuple[Deviation, ...] = ()


def deviation_of(stem: str, case: Mapping[str, Any]) -> Deviation | None:
    """The entry for a case, if there is one."""
    return next((entry for entry in DEVIATIONS if entry.applies(stem, case)), None)
