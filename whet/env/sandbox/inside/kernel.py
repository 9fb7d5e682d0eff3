"""System calls that Python has no function for, by ctypes."""

from __future__ import annotations

import ctypes
import os
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
MACHINE = os.uname().machine

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
"""Attributes of mount_setattr(2)."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 36, 38
_AT_RECURSIVE, _AT_EMPTY_PATH = 0x8000, 0x1000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CLOSE_RANGE, _MOUNT_SETATTR = 436, 442
_CAPABILITY_VERSION = 0x20080522
LAST_CAPABILITY = 63


def check(result: int, what: str) -> int:
    """The result of a system call.

    Raises:
        OSError: it failed. The text begins with `what`.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def call(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """A system call by its number: its result, negative if it failed."""
    given = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return int(LIBC.syscall(ctypes.c_long(number), *given))


def prctl(option: int, value: int = 1) -> None:
    check(LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def unshare(flags: int, what: str) -> None:
    check(LIBC.unshare(flags), f"unshare ({what})")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    done = LIBC.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)
    check(done, f"mount {kind or source} at {target}")


def set_mount(path: str, attributes: int, *, recursive: bool = False) -> None:
    """Add attributes to a mount, and to all below it."""
    given = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0), 32)
    done = call(_MOUNT_SETATTR, -100, path.encode(), _AT_RECURSIVE if recursive else 0, given, 32)
    check(done, f"mount_setattr {path}")


def pivot_root(root: str) -> None:
    """Make a mounted folder the root, and let go of the old one."""
    os.chdir(root)
    check(call(_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every capability, for programs started from here on, too."""
    for number in range(LAST_CAPABILITY + 1):
        if LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break  # the kernel has no more, or this process has no right to
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0), 8)
    check(call(_CAPSET[MACHINE], header, ctypes.create_string_buffer(24)), "capset")


def close_from(first: int) -> None:
    """Close every descriptor from a number on."""
    if call(_CLOSE_RANGE, first, 2**32 - 1, 0) < 0:
        os.closerange(first, 65536)
