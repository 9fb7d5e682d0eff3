"""Opening files of a folder that others may have made: no link in it is followed, and nothing but ordinary files is opened."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path, PurePath

_ONE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


def open_inside(folder: Path, name: str | PurePath) -> BufferedReader:
    """Open an ordinary file in a folder, or in folders below it. The folder itself may be reached
    through links.

    Each part of the name is opened in the folder that was opened before it, so that nothing can be
    changed between the check and the opening.

    Args:
        folder: named by the user.
        name: relative to it; it may come from a file in the folder.

    Raises:
        ValueError: if the name leaves the folder, a part of it is a link, or the file is a pipe, a
            device or a folder.
        OSError: if it does not exist or may not be read.
    """
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts or "\0" in str(name):
        raise ValueError(f"{folder} names the file {str(name)!r}, which does not lie in it")
    at = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            _check(at, part, folder / name, stat.S_ISDIR)
            below = os.open(part, _ONE | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        _check(at, parts[-1], folder / name, stat.S_ISREG)
        file = os.open(parts[-1], _ONE | os.O_NONBLOCK, dir_fd=at)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link since the look at it
            raise ValueError(_refusal(folder / name, stat.S_IFLNK)) from error
        raise
    finally:
        os.close(at)
    if not stat.S_ISREG(mode := os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(_refusal(folder / name, mode))
    return os.fdopen(file, "rb")


def is_file_inside(folder: Path, name: str | PurePath) -> bool:
    """True if `open_inside` opens it.

    Raises:
        ValueError: as there.
    """
    try:
        open_inside(folder, name).close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_inside(folder: Path) -> None:
    """See that a folder holds ordinary files and folders alone, before its files are read by their names.

    Raises:
        ValueError: naming a link, a pipe or a device.
    """
    for place, folders, names in os.walk(folder):
        for path in (Path(place) / name for name in (*folders, *names)):
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise ValueError(_refusal(path, mode))


def _check(at: int, part: str, path: Path, wanted: object) -> None:
    """Opening a device can already do something, so a look comes first."""
    mode = os.stat(part, dir_fd=at, follow_symlinks=False).st_mode
    if stat.S_ISDIR(mode) if wanted is stat.S_ISDIR else stat.S_ISREG(mode):
        return
    raise ValueError(_refusal(path, mode))


def _refusal(path: Path, mode: int) -> str:
    if stat.S_ISLNK(mode):
        return f"{path} is a link, or lies behind one, and no link in a folder is followed: put the file itself there"
    return f"{path} is no ordinary file (a folder, a pipe or a device), and is not opened"
