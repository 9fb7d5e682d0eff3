"""Attempts of a program to get out of its sandbox: `python attempts.py KIND TARGETS`, run in one. It prints which ones were refused.

TARGETS is JSON: `secret` and `open` (a file and a folder outside), `tcp`, `udp`, `unix`, `abstract` (where somebody listens), `pid` (a
process outside), `env` (names that the environment may have).
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
NEWUSER, PTRACE_SEIZE = 0x10000000, 0x4206
"""The latter traces a process without stopping it: where it succeeds, nobody is held up."""
MAX_FORKS = 200
"""More than the self-test allows, and few enough for a machine where nothing holds them."""
FORK_LIFE_S = 5


class AttemptFailed(Exception):
    """The kernel refused."""


def call(on_x86: int, on_arm: int, *arguments: Any) -> int:
    """A system call, made directly.

    Raises:
        AttemptFailed: it failed.
    """
    done = LIBC.syscall(ctypes.c_long(on_x86 if X86 else on_arm), *arguments)
    if done < 0:
        raise AttemptFailed(os.strerror(ctypes.get_errno()))
    return done


def read_outside(targets: dict[str, Any]) -> None:
    with open(targets["secret"]) as file:
        file.read()


def list_outside(targets: dict[str, Any]) -> None:
    os.listdir(targets["open"])


def write_outside(targets: dict[str, Any]) -> None:
    with open(f"{targets['open']}/written", "w") as file:
        file.write("x")


def link_outside(targets: dict[str, Any]) -> None:
    os.symlink(targets["secret"], "link")
    with open("link") as file:
        file.read()


def connect_tcp(targets: dict[str, Any]) -> None:
    socket.create_connection(("127.0.0.1", targets["tcp"]), timeout=2).close()


def send_udp(targets: dict[str, Any]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.sendto(b"x", ("127.0.0.1", targets["udp"]))


def connect_unix(targets: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(targets["unix"])


def connect_abstract(targets: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect("\0" + targets["abstract"])


def send_from_pair(targets: dict[str, Any]) -> None:
    first, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    first.connect(targets["unix"])


def open_netlink(targets: dict[str, Any]) -> None:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()


def signal_outside(targets: dict[str, Any]) -> None:
    os.kill(targets["pid"], 0)


def signal_parent(targets: dict[str, Any]) -> None:
    os.kill(os.getppid() or 1, signal.SIGKILL)
    if os.getppid() <= 1:
        raise AttemptFailed("the first process ignores it")


def read_environment(targets: dict[str, Any]) -> None:
    with open(f"/proc/{targets['pid']}/environ", "rb") as file:
        file.read()


def read_first(targets: dict[str, Any]) -> None:
    with open("/proc/1/environ", "rb") as file:
        file.read()


def see_processes(targets: dict[str, Any]) -> None:
    if str(targets["pid"]) not in os.listdir("/proc"):
        raise AttemptFailed("not listed")


def trace(targets: dict[str, Any]) -> None:
    call(101, 117, PTRACE_SEIZE, targets["pid"], 0, 0)


def trace_child(targets: dict[str, Any]) -> None:
    if not (child := os.fork()):
        signal.pause()
    try:
        call(101, 117, PTRACE_SEIZE, child, 0, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def change_limits(targets: dict[str, Any]) -> None:
    call(302, 261, targets["pid"], 7, None, ctypes.create_string_buffer(16))


def mount(targets: dict[str, Any]) -> None:
    call(165, 40, b"none", b".", b"tmpfs", 0, None)


def unshare(targets: dict[str, Any]) -> None:
    call(272, 97, NEWUSER)


def clone_user(targets: dict[str, Any]) -> None:
    if not call(56, 220, NEWUSER | signal.SIGCHLD, 0, 0, 0, 0):
        os._exit(0)


def become_root(targets: dict[str, Any]) -> None:
    if os.getuid():
        os.setuid(0)


def escape_root(targets: dict[str, Any]) -> None:
    call(161, 51, b".")


def io_uring(targets: dict[str, Any]) -> None:
    call(425, 425, 4, ctypes.create_string_buffer(120))


def userfaultfd(targets: dict[str, Any]) -> None:
    call(323, 282, 1)


def bpf(targets: dict[str, Any]) -> None:
    call(321, 280, 0, ctypes.create_string_buffer(72), 72)


def keyctl(targets: dict[str, Any]) -> None:
    call(250, 219, 0, -3, 0)


def perf(targets: dict[str, Any]) -> None:
    attributes = ctypes.create_string_buffer(b"\x01\x00\x00\x00\x70\x00\x00\x00", 112)
    call(298, 241, attributes, 0, -1, -1, 0)


def shared_memory(targets: dict[str, Any]) -> None:
    call(29, 194, 0, 4096, 0o1600)


def environment(targets: dict[str, Any]) -> None:
    if set(os.environ) <= set(targets["env"]):
        raise AttemptFailed("named variables alone")


def descriptors(targets: dict[str, Any]) -> None:
    for number in range(3, 256):
        try:
            os.fstat(number)
        except OSError:
            continue
        return
    raise AttemptFailed("none is open")


ATTEMPTS: tuple[Callable[[dict[str, Any]], None], ...] = (
    read_outside, list_outside, write_outside, link_outside, connect_tcp, send_udp, connect_unix, connect_abstract, send_from_pair,
    open_netlink, signal_outside, signal_parent, read_environment, read_first, see_processes, trace, trace_child, change_limits, mount,
    unshare, clone_user, become_root, escape_root, io_uring, userfaultfd, bpf, keyctl, perf, shared_memory, environment, descriptors,
)  # fmt: skip


def escapes(targets: dict[str, Any]) -> dict[str, str]:
    """Try everything: by attempt, an empty text where it succeeded, else what refused it."""
    found: dict[str, str] = {}
    for attempt in ATTEMPTS:
        try:
            attempt(targets)
        except (OSError, AttemptFailed) as error:
            found[attempt.__name__] = str(error) or type(error).__name__
        else:
            found[attempt.__name__] = ""
    return found


def forks(most: int) -> int:
    """Processes that could be started at a time.

    Args:
        most: allowed ones. More of them stay until the watcher has seen them.
    """
    number = 0
    with suppress(OSError):
        while number < MAX_FORKS:
            if not os.fork():
                signal.alarm(FORK_LIFE_S)
                signal.pause()
                os._exit(0)
            number += 1
    if number > most:
        time.sleep(FORK_LIFE_S)
    return number


def memory(size_mb: int) -> int:
    """MiB that could be taken."""
    taken: list[bytearray] = []
    try:
        for _ in range(size_mb // 8):
            taken.append(bytearray(b"x") * (8 << 20))
    except MemoryError:
        pass
    return 8 * len(taken)


def main() -> None:
    kind = sys.argv[1]
    if kind == "escapes":
        print(json.dumps(escapes(json.loads(sys.argv[2]))))
    elif kind == "forks":
        print(forks(int(sys.argv[2])))
    else:
        print(memory(int(sys.argv[2])))


if __name__ == "__main__":
    main()
