"""Landlock: the files, ports and processes that a program may reach, by rules that the kernel keeps (landlock(7))."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

from whet.env.sandbox.inside.kernel import call, check

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 9, 1 << 11, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT, _SCOPE_SIGNAL = 1, 2
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of rights over files by version."""
_NEWEST = 5
WITH_PORTS = 4
"""First version that knows ports."""


def version() -> int:
    """Version of the kernel's Landlock; 0: it has none, or it is switched off."""
    return max(0, call(_CREATE, None, 0, 1))


def rules(readable: Iterable[str], devices: Iterable[str], folder: str, port: int | None) -> int:
    """A descriptor of rules that allow reading and running below `readable`, writing to `devices` and below `folder`, and nothing else.

    Args:
        readable: files and folders.
        devices: that may be read and written.
        folder: the sandbox's own.
        port: TCP port that may be connected to; None: none.

    Raises:
        OSError: the kernel has no Landlock, or one that cannot keep to these rules.
    """
    found = version()
    if not found:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    if port is not None and found < WITH_PORTS:
        raise OSError(errno.ENOSYS, f"the kernel's Landlock (version {found}) knows no ports; version {WITH_PORTS} does (Linux 6.7)")
    every = (1 << _RIGHTS[min(found, _NEWEST)]) - 1
    net = _BIND_TCP | _CONNECT_TCP if found >= 4 else 0
    scope = _SCOPE_ABSTRACT | _SCOPE_SIGNAL if found >= 6 else 0
    attributes = struct.pack("=QQQ", every, net, scope)[: 8 * (1 + (found >= 4) + (found >= 6))]
    given = ctypes.create_string_buffer(attributes, len(attributes))
    descriptor = check(call(_CREATE, given, len(attributes), 0), "landlock_create_ruleset")
    os.set_inheritable(descriptor, False)
    for path in readable:
        _allow(descriptor, path, (_EXECUTE | _READ_FILE | _READ_DIR) & every)
    for path in devices:
        _allow(descriptor, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV) & every)
    _allow(descriptor, folder, every & ~(_MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK))
    if port is not None:
        rule = ctypes.create_string_buffer(struct.pack("=QQ", _CONNECT_TCP, port), 16)
        check(call(_ADD_RULE, descriptor, 2, rule, 0), "landlock_add_rule (port)")
    return descriptor


def _allow(descriptor: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        check(call(_ADD_RULE, descriptor, 1, rule, 0), f"landlock_add_rule ({path})")
    finally:
        os.close(place)


def restrict(descriptor: int) -> None:
    """Apply rules to this process, and to all that it starts. Needs PR_SET_NO_NEW_PRIVS."""
    check(call(_RESTRICT, descriptor, 0), "landlock_restrict_self")
