"""The parent of one process that runs code of others, a reward's worker or a server; it ends everything that this process started:
`python -I -S keeper.py CONTROL COMMAND...`.

It runs no other code and imports the standard library alone. On Linux it is a subreaper (prctl(2)): a
process of its worker's that loses its parent becomes its own child, also from a session of its own.
Elsewhere it records the tree of processes, by their ids and start times, as long as it can be seen.

CONTROL is its end of a socket: after `b` it counts the running processes as the worker's own, after `s`
it ends every process started since; it answers each with `.`, or `!` if something could not be ended.
When the socket is closed, or its starter is gone, it ends everything, and after SIGTERM, too. With `-` in place of CONTROL there is
no socket.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_S = 0.5
"""Between two looks at whether the starter is there, and elsewhere than on Linux at the tree."""
END_S = 10.0
"""For processes that are killed to be gone; one in an uninterruptible call may take longer."""
LOOKS = 2
"""In a row that find nothing: a process that changes its parent in the midst of one is not seen in it."""
SWEPT, LEFT = b".", b"!"
PROC = os.path.exists("/proc/self/stat")
LISTED = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
"""True if Linux lists each thread's children."""

Born = dict[int, str]
"""Processes by their ids, each with when it began."""
Table = dict[int, tuple[int, str]]
"""Processes by their ids, each with its parent and its start time."""


class WorkerKeeper:
    """Starts a worker, and ends every process that it started.

    Args:
        control: the socket to the starter.
        command: command of the worker.
    """

    def __init__(self, control: socket.socket, command: list[str]) -> None:
        self._control, self._starter = control, os.getppid()
        self._adopts = _call_prctl(PR_SET_CHILD_SUBREAPER)
        self._ended: int | None = None
        """Status of the worker's end, as waitpid gives it."""
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        self._stopped = False
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._stop)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._worker = _start(command, control)
        self._own: Born = self._below()
        """Processes that the worker keeps from call to call, itself included."""
        self._seen: Born = {}
        """Started processes that may have lost their parent, on systems without a subreaper."""

    def run(self) -> None:
        """Until the worker or its starter ends; then nothing that the worker started is left, and this process ends as the worker did."""
        while self._ended is None and not self._stopped and os.getppid() == self._starter:
            ready, _, _ = select.select([self._control, self._wake], [], [], LOOK_S)
            self._reap()
            if not self._adopts:
                self._seen |= self._below()
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if self._control in ready and not self._obey():
                break
        self._end_all({})
        deadline = time.monotonic() + END_S
        while self._reap() and time.monotonic() < deadline:  # whose threads have not all ended yet cannot be reaped yet
            time.sleep(0.001)
        _end_as(self._ended)

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = True

    def _obey(self) -> bool:
        """Do what the starter asks; False: it is gone."""
        try:
            asked = self._control.recv(64)
        except OSError:
            return False
        for what in asked:
            if what == ord("b"):
                self._own = self._below()
            swept = what != ord("s") or self._end_all(self._own)
            with suppress(OSError):
                self._control.send(SWEPT if swept else LEFT)
        return bool(asked)

    def _end_all(self, spared: Born) -> bool:
        """Kill all that the worker started but `spared`: stopped first, so that nothing new comes while it is looked for.

        Returns:
            Whether all of it is gone.
        """
        deadline, empty = time.monotonic() + END_S, 0
        while time.monotonic() < deadline and empty < LOOKS:
            stopped: Born = {}
            while new := {pid: born for pid, born in self._left(spared).items() if pid not in stopped}:
                for pid in new:
                    _signal(pid, signal.SIGSTOP)
                stopped |= new
            empty = 0 if stopped else empty + 1
            for pid in stopped:
                _signal(pid, signal.SIGKILL)
            while time.monotonic() < deadline and any(self._runs(pid, born) for pid, born in stopped.items()):
                time.sleep(0.001)
        return empty == LOOKS

    def _runs(self, pid: int, born: str) -> bool:
        self._reap()
        row = _row(pid) if PROC else _table().get(pid)
        return row is not None and row[1] == born

    def _left(self, spared: Born) -> Born:
        self._reap()
        found = self._below()
        if not self._adopts:
            table = _table()
            found |= {pid: born for pid, born in self._seen.items() if pid in table and table[pid][1] == born}
        return {pid: born for pid, born in found.items() if spared.get(pid) != born}

    def _below(self) -> Born:
        """All that run below this process, those that it adopted included."""
        return _listed_below(os.getpid()) if LISTED else _below(os.getpid(), _table())

    def _reap(self) -> bool:
        """Ask the children that ended how. Returns whether others are left."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._worker:
                    self._ended = ended[1]
            return True
        return False


def _start(command: list[str], control: socket.socket) -> int:
    """The worker, in its own session; on Linux it dies with this process."""
    keeper, worker = os.getpid(), os.fork()
    if worker:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)  # the worker's pipes are the worker's alone: a reader sees its end
        os.dup2(null, 1)
        os.close(null)
        return worker
    try:
        control.close()
        os.setsid()
        _call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == keeper:
            os.execvp(command[0], command)
    finally:
        os._exit(127)


def _call_prctl(option: int, value: int = 1) -> bool:
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def _listed_below(root: int) -> Born:
    """All that run below a process, as Linux lists each thread's children."""
    found: Born = {}
    parents = [root]
    while parents:
        parent = parents.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(OSError), open(f"/proc/{parent}/task/{thread}/children") as listed:
                    for child in map(int, listed.read().split()):
                        if child not in found and (row := _row(child)) is not None:
                            found[child] = row[1]
                            parents.append(child)
    return found


def _below(root: int, table: Table) -> Born:
    """Likewise, of all processes."""
    found: Born = {}
    parents = {root}
    while parents:
        new = {pid: born for pid, (parent, born) in table.items() if parent in parents and pid not in found}
        found |= new
        parents = set(new)
    return found


def _table() -> Table:
    """Every process that runs: its parent, and when it began."""
    if PROC:
        rows = ((pid, _row(pid)) for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))))
        return {pid: row for pid, row in rows if row is not None}
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state=,lstart="], capture_output=True, text=True, check=False).stdout
    parts = (line.split(None, 3) for line in listed.splitlines())
    return {int(part[0]): (int(part[1]), part[3]) for part in parts if len(part) == 4 and not part[2].startswith("Z")}


def _row(pid: int) -> tuple[int, str] | None:
    """A process's parent, and when it began in the kernel's ticks; None: it is gone, or has ended and waits to be asked how."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), fields[19].decode())


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_as(status: int | None) -> None:
    """End this process with the status that waitpid gave of another."""
    if status is None:
        os._exit(0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(ImportError, OSError, ValueError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    if sys.argv[1] == "-":
        control, kept = socket.socketpair()  # an end that nobody closes before this process ends
        WorkerKeeper(control, sys.argv[2:]).run()
        kept.close()
        return
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    WorkerKeeper(control, sys.argv[2:]).run()


if __name__ == "__main__":
    main()
