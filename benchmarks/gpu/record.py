"""A section's result file, written anew after every case, so that whatever ends the section leaves what it found so far."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NotRun(Exception):
    """A case that cannot run here; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    name: str
    measure: Callable[[], Mapping[str, Any]]
    """Returns its numbers. Raises NotRun where it cannot be made here."""


class Record:
    """The result file of one section.

    Args:
        path: where it is written.
        section: its name.
    """

    def __init__(self, path: Path, section: str) -> None:
        self._path = path
        self.facts: dict[str, Any] = {"section": section, "status": "running", "cases": {}}
        self.write()

    def expect(self, names: Sequence[str]) -> None:
        """Name the cases that are to come."""
        self.facts["cases"].update({name: {"status": "not reached"} for name in names})
        self.write()

    def done(self, name: str, status: str, **facts: Any) -> None:
        """Note what became of a case."""
        self.facts["cases"][name] = {"status": status, **facts}
        self.write()

    def measure(self, case: Case) -> None:
        """Run a case; one that fails does not keep the others from running."""
        began = time.perf_counter()
        try:
            numbers = dict(case.measure())
        except NotRun as reason:
            self.done(case.name, "not run", reason=str(reason))
        except Exception as error:  # the code that is checked may raise anything
            self.done(case.name, "failed", reason=first_line(error), traceback=traceback.format_exc())
        else:
            self.done(case.name, "ok", seconds=round(time.perf_counter() - began, 2), numbers=numbers)

    def end(self) -> bool:
        """Note that the section ended by itself; whether nothing failed."""
        bad = any(case["status"] not in ("ok", "not run") for case in self.facts["cases"].values())
        self.facts["status"] = "failed" if bad else "ok"
        self.write()
        return not bad

    def fail(self, error: BaseException) -> None:
        """Note what kept the section from running its cases."""
        self.facts |= {"status": "failed", "reason": first_line(error), "traceback": traceback.format_exc()}
        self.write()

    def write(self) -> None:
        """Write the file as a whole, so that nobody reads half of it."""
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self.facts, indent=1, default=str) + "\n")
        os.replace(beside, self._path)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        return f"the package {name} is missing: carry its wheel (`make gpu-wheels`, then `make gpu WHEELS=wheels`)"
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]
