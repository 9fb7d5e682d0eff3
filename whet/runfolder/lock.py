"""One process at a time owns a run's folder, by a lock that the kernel lets go of when its holder dies, however it dies."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from whet.files import replace_file
from whet.observe.inside import is_file_inside, open_inside

LOCK = ".lock"
"""Name of the locked file. It is empty, and its existence has no meaning."""
OWNER = ".owner.json"
"""File with the holder of the lock, for people to read; nothing is decided by it."""
MAX_NOTE_BYTES = 1 << 16
WAIT_S = 1.0
"""Seconds that a claim tries: a caller of `owner_of` holds the lock for an instant."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a folder belongs to, as it said itself."""

    pid: int
    """0: it has left no note."""
    host: str
    command: str
    since: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        if not self.pid:
            return "a process that left no note of itself (or its file system has no locks)"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since} ({self.command})"


class FolderInUse(ValueError):
    """Another process, or another part of this one, works in the folder."""

    def __init__(self, folder: Path, owner: Owner) -> None:
        self.folder, self.owner = folder, owner
        super().__init__(f"{folder} is in use by {owner}; wait until it has ended, stop it, or choose another folder")


class Claim:
    """A folder that belongs to this process until `release`, or until the process ends."""

    def __init__(self, folder: Path, lock: BaseFileLock) -> None:
        self.folder, self._lock = folder, lock

    def release(self) -> None:
        """Let go of the folder. Idempotent."""
        if self._lock.is_locked:
            with suppress(OSError):
                (self.folder / OWNER).unlink()
            self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def claim(folder: Path, command: str) -> Claim:
    """Take a folder for this process.

    A program that this process starts does not inherit the lock, so that it does not outlive this process in one.

    Args:
        folder: exists.
        command: command that holds the folder, for the message of another claim.

    Raises:
        FolderInUse: if somebody has it, this process under another claim included.
        ValueError: if the folder cannot be written or its file system has no locks.
    """
    folder = folder.resolve()
    lock = _lock(folder)
    try:
        _acquire(lock, folder, WAIT_S)
    except Timeout as error:
        raise FolderInUse(folder, _noted_owner(folder)) from error
    owner = Owner(os.getpid(), socket.gethostname(), command, time.time())
    try:
        replace_file(folder / OWNER, json.dumps(asdict(owner)) + "\n")
    except OSError as error:
        lock.release()
        raise ValueError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error
    return Claim(folder, lock)


def owner_of(folder: Path) -> Owner | None:
    """Present holder of a folder; None if there is none. Takes nothing away, and makes no file.

    Raises:
        ValueError: if it cannot be found out.
    """
    folder = folder.resolve()
    if not (folder / LOCK).is_dir() and not is_file_inside(folder, LOCK):
        return None
    lock = _lock(folder)
    try:
        _acquire(lock, folder, 0)
    except Timeout:
        return _noted_owner(folder)
    lock.release()
    return None


def _lock(folder: Path) -> BaseFileLock:
    return FileLock(folder / LOCK, thread_local=False)


def _acquire(lock: BaseFileLock, folder: Path, timeout_s: float) -> None:
    """Take the kernel's lock. Raises Timeout if another process holds it, ValueError if there can be
    none."""
    advice = "choose another folder, on a disk of this machine"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of filelock, that it takes a file's existence for a lock instead: refused below
            lock.acquire(timeout=timeout_s)
    except Timeout:
        raise
    except OSError as error:
        raise ValueError(f"{folder} cannot be locked: {error.strerror or error}; {advice}") from error
    except NotImplementedError as error:
        raise ValueError(f"{folder} cannot be locked: its file system has no locks; {advice}") from error
    if isinstance(lock, SoftFileLock):
        lock.release()
        raise ValueError(f"{folder} cannot be locked: its file system has no locks; {advice}")


def _noted_owner(folder: Path) -> Owner:
    try:
        with open_inside(folder, OWNER) as file:
            return Owner(**json.loads(file.read(MAX_NOTE_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Owner(0, "", "", 0.0)
