"""The start of one program in a room: its processes, its user, its limits."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from whet.env.sandbox.inside import filters, kernel, landlock
from whet.env.sandbox.inside.rooms import OLD_PROC, Surroundings

MAX_DESCRIPTORS = 256
NOT_STARTED = 127
"""Status of a program that could not be started, as a shell has it."""
NEVER_S = 10**6


class Started:
    """A program that was started.

    Args:
        pid: the process that is below this one: in namespaces the first one of the program's process namespace, else the program.
        status: descriptor from which the program's status comes, in namespaces alone.
        fault: descriptor from which the reason comes why it could not be started, if so.
    """

    def __init__(self, pid: int, status: int | None, fault: int) -> None:
        self.pid, self.status, self.fault = pid, status, fault
        self.handle = os.pidfd_open(pid)
        os.set_inheritable(self.handle, False)


def start(room: Surroundings, request: Mapping[str, Any], descriptors: tuple[int, int, int]) -> Started:
    """Start a program.

    Args:
        room: its surroundings.
        request: `command`, `env`, `timeout_s`, `memory_mb`, `max_processes`, `file_mb`.
        descriptors: its standard input, output and error output.
    """
    fault_read, fault = os.pipe()
    if not room.in_namespaces:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER)
        if not (pid := os.fork()):
            _run(room, request, descriptors, fault)
        os.close(fault)
        return Started(pid, None, fault_read)
    status_read, status = os.pipe()
    life, alive = os.pipe()
    kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS, "process namespace")
    if not (pid := os.fork()):
        os.close(alive)
        _first(room, request, descriptors, fault, status, life)
    for descriptor in (fault, status, life):
        os.close(descriptor)  # `alive` stays open as long as this process runs
    return Started(pid, status_read, fault_read)


def _first(
    room: Surroundings, request: Mapping[str, Any], descriptors: tuple[int, int, int], fault: int, status: int, life: int
) -> NoReturn:
    """The first process of a process namespace: when it ends, all others in it do."""
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        _die_first(room)
        _mount_proc()
        _take_user(room)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([life], [], [], 0)[0]:
            os._exit(0)  # the parent ended before it could be asked for
        program = os.fork()
    except Exception as error:  # it has no other way to say so
        _fail(fault, error)
    if not program:
        _run(room, request, descriptors, fault)
    os.dup2(status, 0)
    kernel.close_from(1)
    while True:
        pid, ended = os.wait()
        if pid == program:
            with suppress(OSError):
                os.write(0, b"%d\n" % os.waitstatus_to_exitcode(ended))
            os._exit(0)


def _mount_proc() -> None:
    """`/proc` with the namespace's own processes. Where the kernel does not allow it, there is none."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
    for data in ("subset=pid", ""):
        with suppress(OSError):
            kernel.mount("proc", "/proc", "proc", flags, data)
            break
    if os.path.isdir(OLD_PROC):
        kernel.check(kernel.LIBC.umount2(OLD_PROC.encode(), kernel.MNT_DETACH), "umount of the machine's /proc")


def _take_user(room: Surroundings) -> None:
    """Become the sandbox's user, without capabilities."""
    if room.uid is not None:
        os.setgroups([])
        os.setresgid(room.uid, room.uid, room.uid)
        os.setresuid(room.uid, room.uid, room.uid)
    if room.rung != "unsafe":
        kernel.drop_capabilities()


def _run(room: Surroundings, request: Mapping[str, Any], descriptors: tuple[int, int, int], fault: int) -> NoReturn:
    """Become the program."""
    try:
        os.setsid()
        for number, descriptor in enumerate([os.dup(one) for one in descriptors]):
            os.dup2(descriptor, number)
        _die_first(room)
        fault, *rules = _kept([fault] if room.rules is None else [fault, room.rules])
        os.chdir(room.folder)
        os.umask(0o077)
        _limit(request)
        if not room.in_namespaces:  # there, the first process has done so
            _take_user(room)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for rule in rules:
            landlock.restrict(rule)
        if room.filter is not None:
            filters.apply(room.filter)
    except Exception as error:  # it has no other way to say so
        _fail(fault, error)
    command, env = request["command"], request["env"]
    try:
        os.execvpe(command[0], command, env)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            os.write(2, f"{command[0]}: {getattr(error, 'strerror', None) or error}\n".encode(errors="replace"))
    os._exit(NOT_STARTED)


def _kept(descriptors: list[int]) -> list[int]:
    """Descriptors under the numbers from 3 on, closed when the program starts; all others above them are closed now."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in descriptors]
    kept = [os.dup2(descriptor, number, inheritable=False) for number, descriptor in enumerate(high, 3)]
    kernel.close_from(3 + len(kept))
    return kept


def _die_first(room: Surroundings) -> None:
    """Have the kernel end this process before others where memory runs out."""
    with suppress(OSError):
        file = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=room.proc)
        os.write(file, b"1000")
        os.close(file)


def _fail(fault: int, error: Exception) -> NoReturn:
    os.write(fault, str(error).encode(errors="replace")[:4000])
    os._exit(1)


def _limit(request: Mapping[str, Any]) -> None:
    """Limits of one process; the watcher has those of all together."""
    seconds = NEVER_S if request["timeout_s"] is None else int(request["timeout_s"]) + 1
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_DATA: request["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: request["file_mb"] << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_NPROC: request["nproc"],
        resource.RLIMIT_RTPRIO: 0,
    }
    for kind, wanted in limits.items():
        most = resource.getrlimit(kind)[1]
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (value, value))
