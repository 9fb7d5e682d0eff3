"""What a check found, in a form for people and one for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from whet.types import JSON

T = TypeVar("T")
Status = Literal["ok", "warn", "FAIL", "skip"]
"""skip: it could not be checked, and the text says why."""
WORDS: dict[Status, str] = {"FAIL": "failed", "warn": "to look at", "skip": "not checked", "ok": "in order"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report."""

    area: str
    status: Status
    text: str
    lines: tuple[str, ...] = ()
    """What is shown below it."""

    def to_dict(self) -> dict[str, JSON]:
        return {**asdict(self), "lines": list(self.lines)}


@dataclass(frozen=True, slots=True)
class Note:
    """A finding whose area is that of the check which made it."""

    status: Status
    text: str
    lines: tuple[str, ...] = ()

    def of(self, area: str) -> Finding:
        """As one line: what a text has on further lines goes below it."""
        first, *more = self.text.strip().splitlines() or [""]
        return Finding(area, self.status, first, (*more, *self.lines))


class Missing(Exception):
    """A check needs what another one did not find; the text names it."""


def need(value: T | None, what: str) -> T:
    """The value.

    Raises:
        Missing: if there is none.
    """
    if value is None:
        raise Missing(what)
    return value


def ok(text: str, lines: Sequence[str] = ()) -> Note:
    return Note("ok", text, tuple(lines))


def warn(text: str, lines: Sequence[str] = ()) -> Note:
    return Note("warn", text, tuple(lines))


def fail(text: str, lines: Sequence[str] = ()) -> Note:
    return Note("FAIL", text, tuple(lines))


def skip(text: str) -> Note:
    return Note("skip", text)


def line(finding: Finding, areas: Iterable[str]) -> str:
    """A finding as the terminal shows it, in columns as wide as the report's areas."""
    width = max(map(len, areas))
    more = "".join(f"\n{'':<{width + 8}}{text}" for text in finding.lines)
    return f"{finding.area:<{width}}  {finding.status:<4}  {finding.text}{more}"


def summary(findings: Iterable[Finding]) -> str:
    """How many findings there are of each kind."""
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[status]} {word}" for status, word in WORDS.items() if counts[status])
