"""What a test leaves behind: processes below this one, open files, threads, folders."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

LIMIT_S = 10.0


def processes() -> dict[int, int]:
    """Every process that has not ended, with its parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[int(stat.parent.name)] = int(fields[1])
    return found


def below(root: int) -> set[int]:
    """All that run below a process."""
    parents, found, last = processes(), set(), {root}
    while last:
        last = {pid for pid, parent in parents.items() if parent in last} - found
        found |= last
    return found


def open_files() -> Counter[str]:
    """Names of this process's open files."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
    return found


class Left:
    """What there was before.

    Args:
        folder: a folder of the test's own; None: no folder is looked at.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._before = self._now()

    def _now(self) -> tuple[set[int], Counter[str], set[threading.Thread], set[str]]:
        names = set() if self._folder is None else set(os.listdir(self._folder))
        return below(os.getpid()), open_files(), set(threading.enumerate()), names

    def check(self) -> None:
        """See that nothing more is left, or ends within ten seconds."""
        deadline = time.monotonic() + LIMIT_S
        while (more := self._more()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not more, more

    def _more(self) -> list[object]:
        return [new - old for new, old in zip(self._now(), self._before, strict=True) if new - old]
