"""The surroundings of a sandbox's programs: a root of its own in new namespaces, or a folder and rules."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Mapping
from typing import Any

from whet.env.sandbox.inside import filters, kernel, landlock, paths

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
"""Readable in every sandbox, where they are there."""
_FIRST_UID = 0x70000000
"""Users of sandboxes are numbered from here on; no account has such a number."""
_INSIDE_UID = 1000
"""The user in a user namespace."""
OLD_PROC = "/.proc"
"""Place of the machine's /proc until a program's own is mounted."""
_ROOT_SIZE = "size=1m,nr_inodes=2000,mode=755"
_FILES = {
    "/etc/passwd": "user:x:{uid}:{uid}::{folder}:/bin/sh\n",
    "/etc/group": "user:x:{uid}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}


class Surroundings:
    """Surroundings of a sandbox's programs, made in this process once.

    Args:
        settings: `rung`, `readable`, `disk_mb`, `max_files`, `port`, `parent`.

    Raises:
        OSError: the kernel does not allow something that it needs.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.rung: str = settings["rung"]
        self.by_root = os.geteuid() == 0
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.listener: socket.socket | None = None
        self.rules: int | None = None
        self.filter: bytes | None = None
        self.uid: int | None = _FIRST_UID + os.getpid() if self.by_root else None
        """The programs' user; None: this process's own."""
        self._settings = settings
        if self.rung == "namespaces":
            self._enter_namespaces()
        else:
            self._make_folder()
        port = settings["port"]
        if self.rung != "unsafe":
            self.filter = filters.program(tcp=port is not None, signals_others=self.rung == "landlock")
        if self.rung == "landlock":
            self.rules = landlock.rules((*SYSTEM, *settings["readable"]), DEVICES, self.folder, port)

    @property
    def in_namespaces(self) -> bool:
        return self.rung == "namespaces"

    def close(self) -> None:
        """Remove the folder, where no namespace ends with it."""
        if not self.in_namespaces:
            paths.empty(self.folder)
            os.rmdir(self.folder)

    def over(self) -> bool:
        """True if the folder has more in it than it may. In namespaces the kernel sees to it."""
        return not self.in_namespaces and paths.taken(self.folder, self._settings["disk_mb"] << 20, self._settings["max_files"])

    def empty(self) -> None:
        """Remove all that is in the folder."""
        paths.empty(self.folder)
        self._make_hidden()

    def _make_folder(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="whet-sandbox-", dir=self._settings["parent"])
        if self.uid is not None and self.rung == "unsafe":
            self.uid = None
        if self.uid is not None:
            os.chown(self.folder, self.uid, self.uid)
        self._make_hidden()

    def _make_hidden(self) -> None:
        for name in paths.HIDDEN:
            path = f"{self.folder}/{name}"
            os.mkdir(path, 0o700)
            if self.uid is not None:
                os.chown(path, self.uid, self.uid)

    def _enter_namespaces(self) -> None:
        flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
        inside = _INSIDE_UID
        if self.uid is None:
            uid, gid = os.geteuid(), os.getegid()
            kernel.unshare(flags | kernel.CLONE_NEWUSER, "user namespace")
            for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        else:
            inside = self.uid
            kernel.unshare(flags, "namespaces as root")
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        self.folder = _unused("/work", self._settings["readable"])
        self._make_root(inside)
        kernel.pivot_root("/tmp")
        self._make_hidden()
        kernel.set_mount("/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID)
        if self._settings["port"] is not None:
            self.listener = _listener(self._settings["port"])

    def _make_root(self, uid: int) -> None:
        """A root with what may be read, at `/tmp`."""
        readable = _outermost(_past_links([path for path in (*SYSTEM, *self._settings["readable"]) if os.path.exists(path)]))
        sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in readable if not os.path.islink(path)]
        links = [(path, os.readlink(path)) for path in readable if os.path.islink(path)]
        devices = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in DEVICES if os.path.exists(path)]
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, _ROOT_SIZE)
        for path, target in links:
            os.makedirs(f"/tmp{os.path.dirname(path)}", exist_ok=True)
            os.symlink(target, f"/tmp{path}")
        for (path, source), attributes in [
            *((one, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV) for one in sources),
            *((one, kernel.ATTR_NOSUID) for one in devices),
        ]:
            _bind(source, f"/tmp{path}", attributes)
        if self.uid is None:  # a user namespace may mount /proc where another one is in sight
            os.mkdir(f"/tmp{OLD_PROC}")
            kernel.mount("/proc", f"/tmp{OLD_PROC}", "", kernel.MS_BIND | kernel.MS_REC)
        for path, text in _FILES.items():
            if not os.path.lexists(f"/tmp{path}"):
                os.makedirs(f"/tmp{os.path.dirname(path)}", exist_ok=True)
                with open(f"/tmp{path}", "w") as file:
                    file.write(text.format(uid=uid, folder=self.folder))
        for path in ("/proc", self.folder):
            os.mkdir(f"/tmp{path}")
        if not os.path.lexists("/tmp/tmp"):  # else something below it may be read, and TMPDIR alone is writable
            os.symlink(f"{self.folder}/.tmp", "/tmp/tmp")
        os.symlink(f"{self.folder}/.shm", "/tmp/dev/shm")
        for name, number in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
            os.symlink(f"/proc/self/fd{number}", f"/tmp/dev/{name}")
        size = f"size={self._settings['disk_mb']}m,nr_inodes={self._settings['max_files']},mode=700,uid={uid},gid={uid}"
        kernel.mount("tmpfs", f"/tmp{self.folder}", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)


def _unused(path: str, readable: list[str]) -> str:
    """A path at which, and below which, nothing is to be read: `path`, or with a number behind it."""
    number = 1
    found = path
    while any(os.path.normpath(one) == found or os.path.normpath(one).startswith(f"{found}/") for one in readable):
        number += 1
        found = f"{path}{number}"
    return found


def _past_links(found: list[str]) -> list[str]:
    """Paths of which none is below another one that is a link: such a one is where the link leads."""
    links = [f"{os.path.normpath(path)}/" for path in found if os.path.islink(path)]
    return [
        os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) if path.startswith(tuple(links)) else path
        for path in map(os.path.normpath, found)
    ]


def _outermost(found: list[str]) -> list[str]:
    """Paths without those that are below another one."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in found}):
        if not any(path.startswith(f"{other}/") and not os.path.islink(other) for other in kept):
            kept.append(path)
    return kept


def _bind(source: int, target: str, attributes: int) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    kernel.mount(f"/proc/self/fd/{source}", target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.set_mount(target, attributes, recursive=True)
    os.close(source)


def _listener(port: int) -> socket.socket:
    """A listening socket on the loopback of this process's network namespace, which is brought up."""
    up = struct.pack("16sH14s", b"lo", 1, b"")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, up)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    return listener
