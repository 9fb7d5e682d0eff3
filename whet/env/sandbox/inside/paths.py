"""Files of a sandbox's folder: no link is followed, and no path leads out of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HIDDEN = (".tmp", ".shm")
"""Folders in a sandbox's folder that are not listed."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PathFault(Exception):
    """A path that cannot be read or written, in words for the caller."""


def read(folder: str, path: str, max_bytes: int) -> tuple[bytes, int]:
    """The beginning of an ordinary file, and its size."""
    with _parent(folder, path) as (parent, name):
        file = _opened(name, os.O_RDONLY | os.O_NONBLOCK, parent, path)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise PathFault(f"{path} is no ordinary file")
            parts: list[bytes] = []
            left = max_bytes
            while left and (part := os.read(file, left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts), found.st_size
        finally:
            os.close(file)


def write(folder: str, path: str, content: bytes) -> None:
    """Write a file; folders on its way are made."""
    with _parent(folder, path, make=True) as (parent, name):
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(name, dir_fd=parent).st_mode):
                raise PathFault(f"{path} is there, and no ordinary file")
        file = _opened(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, parent, path)
        try:
            done = 0
            while done < len(content):
                done += os.write(file, content[done:])
        except OSError as error:
            raise PathFault(f"{path} cannot be written: {error.strerror}") from error
        finally:
            os.close(file)


def listing(folder: str, path: str, max_names: int) -> list[str]:
    """Names in a folder, sorted, those of folders with `/` and of links with `@` at their end."""
    with _parent(folder, f"{path}/x") as (parent, _):
        found: list[str] = []
        with os.scandir(parent) as entries:
            for entry in entries:
                if path.strip("./") or entry.name not in HIDDEN:
                    mark = "@" if entry.is_symlink() else "/" if entry.is_dir(follow_symlinks=False) else ""
                    found.append(entry.name + mark)
                if len(found) >= max_names:
                    break
        return sorted(found)


@contextmanager
def _parent(folder: str, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """The folder of a path, as a descriptor, and its last part."""
    if "\0" in path or path.startswith("/"):
        raise PathFault(f"{path!r} is no path in the folder: paths are relative to it")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise PathFault(f"{path!r} names no file in the folder: '..' is not allowed")
    place = os.open(folder, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for part in parts[:-1]:
            place = _down(place, part, path, make=make)
        yield place, parts[-1]
    finally:
        os.close(place)


def _down(place: int, part: str, path: str, *, make: bool) -> int:
    """The folder `part` in an open folder, which is closed."""
    if make:
        with suppress(FileExistsError, OSError):
            os.mkdir(part, 0o700, dir_fd=place)
    below = _opened(part, _FOLDER, place, path)
    os.close(place)
    return below


def _opened(name: str, flags: int, parent: int, path: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    except OSError as error:
        raise PathFault(f"{path}: {error.strerror}; links are not followed") from error


def taken(folder: str, max_bytes: int, max_files: int) -> bool:
    """True if a folder has more than `max_bytes` on the disk, or more than `max_files`."""
    num_bytes = num_files = 0
    try:
        for _, folders, files, place in os.fwalk(folder, follow_symlinks=False):
            num_files += len(folders) + len(files)
            for name in files:
                with suppress(FileNotFoundError):
                    num_bytes += os.lstat(name, dir_fd=place).st_blocks * 512
            if num_bytes > max_bytes or num_files > max_files:
                return True
    except RecursionError:  # as deep as no program that means well
        return True
    return False


def empty(folder: str) -> None:
    """Remove all that is in a folder, however deep, whatever its modes. No process may be working in it.

    It is called in the process of a run, too: it neither recurses nor changes the working directory.
    """
    os.chmod(folder, 0o700)
    place = os.open(folder, _FOLDER)
    names: list[str] = []
    try:
        while True:
            if (below := _without_files(place)) is not None:
                os.chmod(below, 0o700, dir_fd=place)
                names.append(below)
                place = _moved(place, below)
            elif names:
                place = _moved(place, "..")
                os.rmdir(names.pop(), dir_fd=place)
            else:
                return
    finally:
        os.close(place)


def _without_files(place: int) -> str | None:
    """Remove files of an open folder until there is none, or a folder is met: its name."""
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=place)
    return None


def _moved(place: int, name: str) -> int:
    """The open folder of a name in an open folder, which is closed then."""
    found = os.open(name, _FOLDER, dir_fd=place)
    os.close(place)
    return found
