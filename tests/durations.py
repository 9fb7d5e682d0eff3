"""Writes how long the tests of each file take to a file that is kept.

`make durations` runs all but the slow tests, and writes tests/durations.txt.

The seconds are of the processor's time, of the test's own process and of the children that it waited for: on a
machine that does other work, too, they are nearly those of a quiet one. A module's fixtures count with the test
that asks first.
"""

from __future__ import annotations

import platform
import resource
import subprocess
from collections import Counter
from collections.abc import Generator
from datetime import date
from pathlib import Path

import pytest

HEAD = """\
# {date}, {machine}, commit {commit}; written by `make durations`.
# Seconds of the processor's time (and on the clock, beside other work) by file: in `make test`, in `make test-rest`.
"""


SINCE = pytest.StashKey[float]()
"""The processor's time at the last report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="where to write the seconds of each file of tests")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-file")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(path))


def cpu_s() -> float:
    """Seconds of the processor's time of this process and of the children that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[SINCE] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("--durations-file") is not None:
        now = cpu_s()
        report.cpu_s = now - item.config.stash[SINCE]
        report.lot = "rest" if item.get_closest_marker("long") else "test"
        item.config.stash[SINCE] = now
    return report


class Durations:
    """Sums what the tests report, in the process that starts them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cpu_s: Counter[tuple[str, str]] = Counter()
        self.wall_s: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "cpu_s"):  # a worker process that died
            return
        key = report.nodeid.split("::")[0], report.lot
        self.cpu_s[key] += report.cpu_s
        self.wall_s[key] += report.duration

    def pytest_sessionfinish(self) -> None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        files = sorted({name for name, _ in self.cpu_s}, key=lambda name: -self.cpu_s[name, "test"] - self.cpu_s[name, "rest"])
        lines = [self.line("all", files), *(self.line(name, [name]) for name in files)]
        head = HEAD.format(date=date.today(), machine=platform.machine(), commit=commit)
        self.path.write_text(head + "".join(lines))

    def line(self, name: str, files: list[str]) -> str:
        sums = [sum(times[file, lot] for file in files) for lot in ("test", "rest") for times in (self.cpu_s, self.wall_s)]
        return f"{sums[0]:7.1f} ({sums[1]:6.1f}) {sums[2]:7.1f} ({sums[3]:6.1f}) {name}\n"
