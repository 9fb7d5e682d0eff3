"""Findings of a check, for people and for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar

from whet.types import JSON

T = TypeVar("T")
Status = Literal["ok", "warn", "FAIL", "skip"]
"""Result of a check. skip: it could not be made, and the text gives the reason."""
WORDS: dict[Status, str] = {"FAIL": "failed", "warn": "to look at", "skip": "not checked", "ok": "in order"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a report."""

    area: str
    status: Status
    text: str
    lines: tuple[str, ...] = ()
    """Lines shown below it."""

    def to_dict(self) -> dict[str, JSON]:
        return {**asdict(self), "lines": list(self.lines)}


@dataclass(frozen=True, slots=True)
class Note:
    """A finding without its area, which is the one of the check that made it."""

    status: Status
    text: str
    lines: tuple[str, ...] = ()

    def of(self, area: str) -> Finding:
        """The note as a finding: its first line, and all others below it."""
        first, *more = self.text.strip().splitlines() or [""]
        return Finding(area, self.status, first, (*more, *self.lines))


class Missing(Exception):
    """A check needs a result that an earlier check did not get; the text names it."""


def need(value: T | None, what: str) -> T:
    """The value, if there is one.

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
    """A finding in columns as wide as the report's areas."""
    width = max(map(len, areas))
    more = "".join(f"\n{'':<{width + 8}}{text}" for text in finding.lines)
    return f"{finding.area:<{width}}  {finding.status:<4}  {finding.text}{more}"


def summary(findings: Iterable[Finding]) -> str:
    """Number of findings of each status, in words."""
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[status]} {word}" for status, word in WORDS.items() if counts[status])
