"""Folders of versions: written under a temporary name, renamed when they are whole, and only the last
ones kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from whet.files import sync_folder
from whet.transport.base import TransportError

T = TypeVar("T")

KEPT = 2
"""Versions that a run keeps on disk."""


class Versions:
    """The versions in a folder, each in a folder of its own.

    Args:
        folder: made when the first version is written.
        keep: number of versions to keep.
        ending: ending of their names.
    """

    def __init__(self, folder: Path, keep: int, ending: str = "") -> None:
        self._folder, self._keep, self._ending = folder, keep, ending

    def path(self, version: int) -> Path:
        return self._folder / f"version_{version:06d}{self._ending}"

    def write(self, version: int, write: Callable[[Path], T]) -> T:
        """Have a version written; a reader sees all of it or nothing.

        Raises:
            TransportError: if the disk is full, say; those that were there before are whole.
        """
        draft = self._folder / f".writing_{self.path(version).name}"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            found = write(draft)
            sync_folder(draft)
            shutil.rmtree(self.path(version), ignore_errors=True)  # of a run that went on from before it
            os.replace(draft, self.path(version))
            sync_folder(self._folder)
        except OSError as error:
            free = shutil.disk_usage(self._folder if self._folder.exists() else self._folder.parent).free / 2**20
            raise TransportError(
                f"version {version} cannot be written to {self._folder}: {os.strerror(error.errno or 0)} ({free:.0f} MiB free); make room, "
                "or set sync.folder"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self._prune(version)
        return found

    def _prune(self, newest: int) -> None:
        """Remove all but the last ones. Those behind the newest are of a run that went on from before them."""
        found = {int(path.name.removeprefix("version_").removesuffix(self._ending)): path for path in self._mine()}
        last = sorted(number for number in found if number <= newest)[-self._keep :]
        for number, path in found.items():
            if number not in last:
                shutil.rmtree(path, ignore_errors=True)

    def _mine(self) -> list[Path]:
        found = self._folder.glob(f"version_*{self._ending}")
        return [path for path in found if path.name.removeprefix("version_").removesuffix(self._ending).isdigit()]
