"""The processes below one, what they take, and their end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

END_S = 10.0
"""For processes that are killed to be gone; one in an uninterruptible call may take longer."""
LOOKS = 2
"""In a row that find nothing: a process that changes its parent in the midst of one is not seen in it."""
PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessTree:
    """Reads processes from a folder `/proc` that was opened before the root changed.

    Args:
        proc: its descriptor.
    """

    def __init__(self, proc: int) -> None:
        self._proc = proc

    def below(self, root: int) -> dict[int, str]:
        """All that run below a process, each with its start time."""
        found: dict[int, str] = {}
        parents = [root]
        while parents:
            for child in self.children(parents.pop()):
                if child not in found and (born := self.born(child)) is not None:
                    found[child] = born
                    parents.append(child)
        return found

    def num_tasks(self, uid: int) -> int:
        """Processes and threads of a user."""
        num = 0
        for pid in filter(str.isdecimal, os.listdir(self._proc)):
            with suppress(OSError):
                if os.stat(pid, dir_fd=self._proc).st_uid == uid:
                    num += len(self._names(f"{pid}/task"))
        return num

    def memory(self, pids: list[int], limit: int) -> int:
        """Bytes that processes hold in memory. Pages that they share count once if the sum would be over the limit."""
        resident = sum(self._resident(pid) for pid in pids)
        return resident if resident <= limit else sum(self._share(pid) for pid in pids)

    def end_below(self, root: int) -> bool:
        """Kill all below a process: stopped first, so that nothing new comes while it is looked for. True if all are gone."""
        deadline, empty = time.monotonic() + END_S, 0
        while time.monotonic() < deadline and empty < LOOKS:
            reap()
            stopped: dict[int, str] = {}
            while new := {pid: born for pid, born in self.below(root).items() if pid not in stopped}:
                for pid in new:
                    _signal(pid, signal.SIGSTOP)
                stopped |= new
            empty = 0 if stopped else empty + 1
            for pid in stopped:
                _signal(pid, signal.SIGKILL)
            while time.monotonic() < deadline and any(self.born(pid) == born for pid, born in stopped.items()):
                reap()
                time.sleep(0.001)
        return empty == LOOKS

    def born(self, pid: int) -> str | None:
        """When a process began, in the kernel's ticks; None: it is gone, or waits to be asked how it ended."""
        fields = self._read(f"{pid}/stat").rpartition(b")")[2].split()
        return None if not fields or fields[0] in (b"Z", b"X") else fields[19].decode()

    def children(self, pid: int) -> list[int]:
        """Children of a process."""
        found: list[int] = []
        with suppress(OSError):
            for thread in self._names(f"{pid}/task"):
                found += map(int, self._read(f"{pid}/task/{thread}/children").split())
        return found

    def _names(self, path: str) -> list[str]:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read(self, path: str) -> bytes:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return b""
        try:
            return os.read(file, 1 << 16)
        except OSError:  # the process ended meanwhile
            return b""
        finally:
            os.close(file)

    def _resident(self, pid: int) -> int:
        fields = self._read(f"{pid}/statm").split()
        return int(fields[1]) * PAGE if fields else 0

    def _share(self, pid: int) -> int:
        for line in self._read(f"{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
        lines = [line.split() for line in self._read(f"{pid}/status").splitlines()]  # where the above is another user's
        return sum(int(line[1]) * 1024 for line in lines if line and line[0] in (b"RssAnon:", b"RssShmem:"))


def reap() -> dict[int, int]:
    """Children of this process that have ended, each with its status as waitpid gives it."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended[one[0]] = one[1]
    return ended


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
