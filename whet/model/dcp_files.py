"""Reading torch's distributed checkpoints (DCP) without running what their description might ask for."""

from __future__ import annotations

import pickle
import time
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

META = ".metadata"
SEEN_S = 10.0
"""For a file that another machine has written to be seen on this one."""
_DESCRIPTION = "torch.distributed.checkpoint.metadata"
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
ALLOWED = {
    *(
        (_DESCRIPTION, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    *(("torch", name) for name in _DTYPES),
}
"""What a description is made of: (module, name), as a pickle names it."""


class _Plain(pickle.Unpickler):
    """Knows what the pickles of any Python from 3.11 on name, whichever reads them."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        module = "pathlib" if module == "pathlib._local" else module  # as 3.13 calls it
        if (module, name) not in ALLOWED:  # whole pairs: a dotted name would reach whatever a module imports
            raise ValueError(f"it names {module}.{name}, which no checkpoint needs: it is damaged, or made to run code")
        return super().find_class(module, name)


def _memory_format(owner: object, name: str) -> _MEM_FORMAT_ENCODING:
    """A member of the one enum that a description has: until 3.11.3 Python pickled members as attributes of it."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise ValueError(f"it asks for {name!r} of {owner!r}, which no checkpoint needs: it is damaged, or made to run code")
    return _MEM_FORMAT_ENCODING[name]


class DcpFiles(FileSystemReader):
    """A `FileSystemReader` for folders that others may have made: nothing but plain records is unpickled, and no file outside is read.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._meta = folder / META

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Raises ValueError if it names what no checkpoint needs; a damaged pickle raises what it likes."""
        with open(self._meta, "rb") as file:
            found = _Plain(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"{self._meta} describes no checkpoint")
        for info in (found.storage_data or {}).values():
            if PurePath(info.relative_path).name != info.relative_path:
                raise ValueError(f"{self._meta} names the file {info.relative_path!r}, which is not beside it")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def check_there(self) -> None:
        """See that what the ranks of a job have written is here, all of it.

        Raises:
            OSError: naming what is not: a rank has written it to another file system.
        """
        names = sorted({info.relative_path for info in (self.read_metadata().storage_data or {}).values()})
        deadline = time.monotonic() + SEEN_S
        while lacking := [name for name in names if not (self._meta.parent / name).is_file()]:
            if time.monotonic() > deadline:
                raise OSError(
                    f"{self._meta.parent} lacks {len(lacking)} of {len(names)} files that the ranks have written, among them {lacking[0]}: "
                    "run_dir must be on a file system that all of them share"
                )
            time.sleep(0.2)
