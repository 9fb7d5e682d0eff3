"""A version as a folder in Hugging Face format: written by the names and in the parts that files have, and read back from there."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from whet.model.decoder import DecoderModel
from whet.model.folders import open_weights, write_weights
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.model.quantization import Quantization
from whet.model.quantization_folder import describe_format
from whet.transport.base import DiskTicket, TransportError


class FolderWriter:
    """Writes versions of one model.

    Args:
        model: its configuration and buffers are written as they are.
        shard_bytes: size of a file of weights.
        quantization: format that weights come in, by the names of files; None: as the model has them.

    Raises:
        ValueError: if the model's tensors cannot be written one after another.
    """

    def __init__(self, model: DecoderModel, shard_bytes: int, quantization: Quantization | None = None) -> None:
        self._model, self._naming, self._shard_bytes = model, Naming(without_contents(model)), shard_bytes
        self._quantization = quantization

    def write(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Returns bytes of all tensors."""
        described = type(self._model.config).from_dict(self._model.config.to_dict())
        described.dtype = self._model.dtype
        described.save_pretrained(folder)
        if self._quantization is not None:
            describe_format(folder, self._quantization)
        return write_weights(folder, self._in_files(weights), self._shard_bytes)

    def _in_files(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield from [(name, tensor)] if self._quantization is not None else self._naming.to_files(name, tensor.detach())
        for name, buffer in self._model.saved_buffers():
            yield from self._naming.to_files(name, buffer)


def read_folder(ticket: DiskTicket, naming: Naming) -> Iterator[tuple[str, Tensor]]:
    """The weights of a version, by the model's own names.

    Raises:
        TransportError: if a file is missing or damaged.
    """
    check_seen(ticket.folder)
    try:
        with open_weights(ticket.folder) as files:
            for name in naming.parameters:
                if lacking := [file for file in naming.files[name] if file not in files]:
                    raise TransportError(f"{ticket.folder} lacks {len(lacking)} tensors of {name}, among them {lacking[0]}")
                yield name, naming.from_files(name, lambda file: files[file].get_tensor(file))
    except (ValueError, OSError) as error:
        raise TransportError(f"{error}") from error


def check_seen(folder: Path) -> None:
    """Check that a folder written elsewhere can be read here.

    Raises:
        TransportError: if it does not exist here.
    """
    if not folder.is_dir():
        why = "sync.folder must lie on a file system that trainer and engines share"
        raise TransportError(f"{folder} is not to be seen on {socket.gethostname()}; {why}")
