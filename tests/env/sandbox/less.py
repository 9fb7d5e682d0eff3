"""`python less.py docker|nobody COMMAND...`: a command with the rights that it has in plain Docker, or as another user than root.

In plain Docker root has 14 capabilities, and a filter refuses new namespaces and mounts.
"""

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
CAPABILITIES = 0xA80425FB
REFUSED = {"unshare": (272, 97), "mount": (165, 40), "umount2": (166, 39), "setns": (308, 268), "pivot_root": (155, 41)}
NOBODY = 65534


def docker():
    package = ModuleType("whet")  # without what `import whet` loads: the interpreter may have no packages
    package.__path__ = [str(ROOT / "whet")]
    sys.modules["whet"] = package
    from whet.env.sandbox.inside import filters, kernel

    parts = [filters._answer(REFUSED, errno.EPERM), filters._answer({"clone3": (435, 435)}, errno.ENOSYS)]
    clone = filters._refuse("clone", (0, "has", 0x7E020000, 0xFFFFFFFF))
    filters.apply(b"".join(parts) + clone + struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
    for number in range(64):
        if not CAPABILITIES >> number & 1:
            kernel.LIBC.prctl(kernel.PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
    low = struct.pack("=III", CAPABILITIES, CAPABILITIES, 0)
    header, data = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0), 8), ctypes.create_string_buffer(low + bytes(12), 24)
    kernel.check(kernel.call(kernel._CAPSET[kernel.MACHINE], header, data), "capset")


def nobody():
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


if __name__ == "__main__":
    {"docker": docker, "nobody": nobody}[sys.argv[1]]()
    os.execv(sys.argv[2], sys.argv[2:])
