"""Weights in torch's distributed checkpoint format (DCP), written and read tensor by tensor in one process."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from whet.model.dcp_files import META, DcpFiles


def write_dcp(folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Write weights as a checkpoint of several files, of which no more than one is held at a time; what says where all are is written last.

    Args:
        folder: made here.
        weights: each name once.
        shard_bytes: of a file; a larger tensor has one of its own.

    Returns:
        Bytes of all tensors.

    Raises:
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True)
    metadata: list[Metadata] = []
    held: dict[str, Tensor] = {}
    size, total = 0, 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > shard_bytes:
            metadata.append(_write_file(folder, held, len(metadata)))
            held, size = {}, 0
        held[name] = tensor.detach().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    metadata.append(_write_file(folder, held, len(metadata)))
    with open(folder / META, "wb") as file:
        pickle.dump(_joined(metadata), file)
        file.flush()
        os.fsync(file.fileno())
    return total


def _write_file(folder: Path, tensors: dict[str, Tensor], number: int) -> Metadata:
    draft = folder / ".writing"
    with _alone():
        save(dict(tensors), checkpoint_id=draft, no_dist=True)
    metadata = DcpFiles(draft).read_metadata()
    for info in metadata.storage_data.values():
        name = f"__0_{number}.distcp"
        if (draft / info.relative_path).exists():
            os.replace(draft / info.relative_path, folder / name)
        info.relative_path = name
    shutil.rmtree(draft)
    return metadata


@contextmanager
def _alone() -> Iterator[None]:
    """One process is what is wanted here, and torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _joined(parts: list[Metadata]) -> Metadata:
    """One description of all files."""
    first = parts[0]
    for part in parts[1:]:
        first.state_dict_metadata |= part.state_dict_metadata
        first.planner_data |= part.planner_data
        first.storage_data |= part.storage_data
    return first


class DcpReader:
    """A checkpoint's tensors by name.

    Args:
        folder: of the checkpoint.

    Raises:
        ValueError: if its description cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._found = DcpFiles(folder).read_metadata().state_dict_metadata
        except Exception as error:  # a pickle that is damaged raises what it likes
            raise ValueError(f"{folder / META} cannot be read: {type(error).__name__}: {error}") from error

    @property
    def names(self) -> set[str]:
        return {name for name, entry in self._found.items() if isinstance(entry, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        """One tensor, whole, whatever ranks wrote it.

        Raises:
            ValueError: if a file is missing or damaged.
        """
        entry = self._found[name]
        assert isinstance(entry, TensorStorageMetadata)
        out = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        try:
            with _alone():
                load(out, storage_reader=DcpFiles(self._folder), no_dist=True)
        except Exception as error:  # torch wraps whatever went wrong
            raise ValueError(f"{self._folder}: {name} cannot be read: {str(error).strip().splitlines()[-1]}") from error
        return out[name]
