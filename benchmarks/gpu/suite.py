"""pytest within a section: every test becomes a case, also those that were skipped or not reached."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gpu.record import Record

ROOT = Path(__file__).resolve().parents[2]
TEST_TIMEOUT_S = 40


def run_tests(record: Record, device: torch.device, paths: Sequence[str], end: float, options: Sequence[str] = ()) -> None:
    """Run test files, and note every test in the record.

    Args:
        record: of the section.
        device: where the tests' models lie.
        paths: below the repository.
        end: `time.monotonic()` after which no further test begins.
        options: more of pytest's.
    """
    os.environ["WHET_TEST_DEVICE"] = str(device)
    own = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={TEST_TIMEOUT_S}", "--rootdir", str(ROOT), *options]
    code = pytest.main([*own, *(str(ROOT / path) for path in paths)], plugins=[_Noted(record, end)])
    record.facts["pytest"] = str(code)


class _Noted:
    """Notes what pytest tells."""

    def __init__(self, record: Record, end: float) -> None:
        self._record, self._end = record, end

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._record.expect([item.nodeid for item in items])

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._record.done(item.nodeid, "not run", reason="it is not among those of the small form")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record.done(report.nodeid, "failed", reason=_last_line(report.longreprtext), traceback=report.longreprtext[-4000:])
        elif report.skipped:
            self._record.done(report.nodeid, "not run", reason=_why(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() < self._end:
            return None
        self._record.done(item.nodeid, "not run", reason="the section's time was over")
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            facts = {"reason": _last_line(report.longreprtext), "traceback": report.longreprtext[-4000:]}
            self._record.done(report.nodeid, "failed", seconds=round(report.duration, 2), **facts)
        elif report.skipped:
            self._record.done(report.nodeid, "not run", reason=_why(report))
        elif report.when == "call":
            self._record.done(report.nodeid, "ok", seconds=round(report.duration, 2))


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The reason of a skip."""
    found = report.longrepr
    return str(found[2] if isinstance(found, tuple) else found).removeprefix("Skipped: ")


def _last_line(text: str) -> str:
    """What pytest marks as the error."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return (marked or text.strip().splitlines() or [""])[0][:300]
