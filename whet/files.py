"""Files that survive a crash: lines that are on disk once they are appended, small files that are replaced whole; and reading what a
crash may have left."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from whet.types import JSON

BLOCK_BYTES = 65536


class AppendedLines:
    """A text file that only grows. A line is on disk when `append` returns; a last line that a crash tore off is cut when
    the file is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._file.truncate(self._end_of_lines())

    def append(self, line: str) -> None:
        """Add a line, or several with newlines between them.

        Raises:
            OSError: if it cannot be written; the file is then as it was before.
        """
        rest = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
        begin = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(begin)
            raise

    def close(self) -> None:
        self._file.close()

    def _end_of_lines(self) -> int:
        """End of the last whole line."""
        end = self._file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - BLOCK_BYTES)
            self._file.seek(begin)
            found = self._file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a crash, sees the old one or the new one, whole.

    Raises:
        OSError: if it cannot be written; the old one is still there.
    """
    draft = path.with_name(f".{path.name.lstrip('.')}.writing")
    try:
        with open(draft, "wb") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def put_in_place(draft: Path, path: Path) -> None:
    """Give a written file its name, once its contents are on the disk; when this returns, its name is, too.

    Raises:
        OSError: if that fails; what `path` was before is still there, or the new file is.
    """
    sync_file(draft)
    os.replace(draft, path)
    sync_folder(path.parent)


def write_durably(path: Path, text: str) -> None:
    """Write a new file, and return when its contents are on the disk. Its name is there once `sync_folder` returned for its folder.

    Raises:
        OSError: if it cannot be written.
    """
    path.write_text(text)
    sync_file(path)


def sync_file(path: Path) -> None:
    """Bring a written file's contents to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file, without reading all of it; one that is still being written included."""
    data = b""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0 and data.count(b"\n") <= count:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            data = file.read(end - begin) + data
            end = begin
    lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
    return lines[-count:] if data else []


def parse_object(text: str | bytes) -> dict[str, JSON] | None:
    """The object that is a JSON text; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
