"""Weights in torch's distributed checkpoint format (DCP), written and read tensor by tensor in one process."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from whet.files import sync_file
from whet.model.dcp_files import META, DcpFiles


def write_dcp(folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Write weights as a checkpoint of several files, with no more than one of them in memory. The
    index is written last.

    Args:
        folder: made here.
        weights: each name once.
        shard_bytes: size of a file; a larger tensor has its own file.

    Returns:
        Bytes of all tensors.

    Raises:
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True)
    described = Metadata({}, {}, {})
    held: dict[str, Tensor] = {}
    number, size, total = 0, 0, 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > shard_bytes:
            _write_file(folder / f"__0_{number}.distcp", held, described)
            held, number, size = {}, number + 1, 0
        held[name] = tensor.detach().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    _write_file(folder / f"__0_{number}.distcp", held, described)
    with open(folder / META, "wb") as file:
        pickle.dump(described, file)
    sync_file(folder / META)
    return total


def _write_file(path: Path, tensors: Mapping[str, Tensor], described: Metadata) -> None:
    """Write a file of tensors, and add where each is to the description."""
    with open(path, "wb") as file:
        for name, tensor in tensors.items():
            whole = tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor  # else all of its storage is saved
            offsets, begin = torch.Size([0] * tensor.dim()), file.tell()
            torch.save(whole, file)
            chunk = ChunkStorageMetadata(offsets, tensor.size())
            described.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties.create_from_tensor(whole), tensor.size(), [chunk])
            described.planner_data[name] = (name,)
            described.storage_data[MetadataIndex(name, offsets, 0)] = _StorageInfo(path.name, begin, file.tell() - begin)
    sync_file(path)


class DcpReader:
    """A checkpoint's tensors by name.

    Args:
        folder: folder of the checkpoint.

    Raises:
        ValueError: if its description cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._files = DcpFiles(folder)
        try:
            self.names = set(self._files.entries)
        except OSError as error:
            raise ValueError(f"{folder / META} cannot be read: {error}") from error

    def read(self, name: str) -> Tensor:
        """One whole tensor, written by any number of ranks.

        Raises:
            ValueError: if a file is missing or damaged.
        """
        return self._files.read(name)
