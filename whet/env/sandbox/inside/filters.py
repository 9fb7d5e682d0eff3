"""The system calls that a program in a sandbox may not make, as a seccomp filter (seccomp(2))."""

from __future__ import annotations

import ctypes
import errno
import struct

from whet.env.sandbox.inside.kernel import LIBC, MACHINE, PR_SET_SECCOMP, check

_DENIED = {
    # name: number on x86_64, on aarch64; None: it is not there
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443), "reboot": (169, 142),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
    "sysfs": (139, None), "acct": (163, 89), "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "vhangup": (153, 58),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "lookup_dcookie": (212, 18),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "personality": (135, 92), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
}  # fmt: skip
"""Answered with EPERM. memfd_create and the objects of System V are memory that no limit counts."""
_NETWORK = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242)}
_MISSING = {"clone3": (435, 435)}
"""Answered with ENOSYS: its flags are behind a pointer, and the C library goes on with clone."""
_CHECKED = {
    "clone": (56, 220), "socketpair": (53, 199), "socket": (41, 198), "prlimit64": (302, 261), "ioctl": (16, 29), "sendto": (44, 206),
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
}  # fmt: skip
_NEWEST = 462
"""The last system call that this list knows; newer ones are answered with ENOSYS."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NAMESPACES = 0x7E020000
"""Flags of clone for new namespaces."""
_AF_UNIX, _AF_INET, _SOCK_STREAM, _TCP, _MSG_FASTOPEN = 1, 2, 1, 6, 0x20000000
_TYPE_MASK = 0xF
_ALL = 0xFFFFFFFF
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

_LOAD, _AND, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x25, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

Condition = tuple[int, str, int, int]
"""An argument's number, `is`, `is not` or `has`, a value, and a mask for the argument's lower half."""


def _number(pair: tuple[int | None, int | None]) -> int | None:
    return pair[0 if MACHINE == "x86_64" else 1]


def _instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _refuse(name: str, *conditions: Condition) -> bytes:
    """EPERM for a system call whose arguments meet all conditions."""
    number = _number(_CHECKED[name])
    assert number is not None
    body = b""
    tests: list[bytes] = []
    for argument, _, _, mask in conditions:
        load = _instruction(_LOAD, 16 + 8 * argument)
        tests.append(load + (_instruction(_AND, mask) if mask != _ALL else b""))
    left = [len(test) // 8 + 1 for test in tests]
    for index, (_, how, value, _) in enumerate(conditions):
        skip = sum(left[index + 1 :]) + 1
        code = _JUMP_SET if how == "has" else _JUMP_EQUAL
        jump = _instruction(code, value, skip, 0) if how == "is not" else _instruction(code, value, 0, skip)
        body += tests[index] + jump
    body += _instruction(_RETURN, _ERRNO | errno.EPERM)
    return _instruction(_LOAD, 0) + _instruction(_JUMP_EQUAL, number, 0, len(body) // 8) + body


def _answer(table: dict[str, tuple[int | None, int | None]], error: int) -> bytes:
    """One error for all system calls of a table."""
    numbers = [number for pair in table.values() if (number := _number(pair)) is not None]
    jumps = [_instruction(_JUMP_EQUAL, number, len(numbers) - index, 0) for index, number in enumerate(numbers)]
    over = _instruction(0x05, 1)  # past the return, for all others
    return _instruction(_LOAD, 0) + b"".join(jumps) + over + _instruction(_RETURN, _ERRNO | error)


def program(*, tcp: bool, signals_others: bool) -> bytes:
    """The filter as instructions.

    Args:
        tcp: TCP sockets may be made; something else decides whom they reach.
        signals_others: the program's user has other processes, whose priorities must be out of reach.

    Raises:
        OSError: the numbers of this processor's system calls are not known.
    """
    if MACHINE not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp filter for processors of the kind {MACHINE}")
    parts = [
        _instruction(_LOAD, 4) + _instruction(_JUMP_EQUAL, _AUDIT_ARCH[MACHINE], 1, 0) + _instruction(_RETURN, _KILL),
        _instruction(_LOAD, 0) + _instruction(_JUMP_GREATER, _NEWEST, 0, 1) + _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _answer(dict(_DENIED), errno.EPERM),
        _answer(dict(_MISSING), errno.ENOSYS),
        _refuse("clone", (0, "has", _NAMESPACES, _ALL)),
        _refuse("prlimit64", (0, "is not", 0, _ALL)),
        _refuse("ioctl", (1, "is", _TIOCSTI, _ALL)),
        _refuse("ioctl", (1, "is", _TIOCLINUX, _ALL)),
        _refuse("socketpair", (0, "is not", _AF_UNIX, _ALL)),
        _refuse("socketpair", (1, "is not", _SOCK_STREAM, _TYPE_MASK)),  # others could be sent to any address
    ]
    if tcp:
        parts += [
            _refuse("socket", (0, "is not", _AF_INET, _ALL)),
            _refuse("socket", (1, "is not", _SOCK_STREAM, _TYPE_MASK)),
            _refuse("socket", (2, "is not", 0, _ALL), (2, "is not", _TCP, _ALL)),
            _refuse("sendto", (3, "has", _MSG_FASTOPEN, _ALL)),  # it connects without being asked
            _refuse("sendmsg", (2, "has", _MSG_FASTOPEN, _ALL)),
            _refuse("sendmmsg", (3, "has", _MSG_FASTOPEN, _ALL)),
        ]
    else:
        parts.append(_answer(dict(_NETWORK), errno.EPERM))
    if signals_others:
        for name in ("sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"):
            parts.append(_refuse(name, (0, "is not", 0, _ALL)))
        parts += [_refuse(name, (1, "is not", 0, _ALL)) for name in ("setpriority", "ioprio_set")]
    return b"".join(parts) + _instruction(_RETURN, _ALLOW)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def apply(instructions: bytes) -> None:
    """Apply a filter to this process, and to all that it starts. Needs PR_SET_NO_NEW_PRIVS.

    Raises:
        OSError: the kernel has no filters, or does not allow this one.
    """
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    given = _Program(len(instructions) // 8, ctypes.cast(memory, ctypes.c_void_p).value)
    check(LIBC.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(given), 0, 0), "seccomp")
