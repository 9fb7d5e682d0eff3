"""The transport over a file system: each version is a folder in Hugging Face format, which anything else can read, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from whet.model.folders import read_weights, write_weights
from whet.transport.base import DiskTicket, Sent, Ticket, TransportError, waited_s
from whet.transport.versions import Versions


class DiskSender:
    """Writes whole folders.

    Args:
        folder: where they lie, on a file system that the engines have, too.
        keep: how many versions stay.
        shard_bytes: of a file of weights.
        timeout_s: how long an engine may take.
        describe: writes what a Hugging Face folder has beside weights: config.json.
    """

    simultaneous = False

    def __init__(self, folder: Path, keep: int, shard_bytes: int, timeout_s: float, describe: Callable[[Path], None]) -> None:
        self._versions, self._shard_bytes, self._describe = Versions(folder, keep), shard_bytes, describe
        self.timeout_s = timeout_s

    def begin(self, version: int, receivers: Sequence[str]) -> Ticket:
        return DiskTicket(version, self._versions.path(version))

    def send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]]) -> Sent:
        began = time.perf_counter()

        def write(folder: Path) -> int:
            self._describe(folder)
            return write_weights(folder, weights, self._shard_bytes)

        size = self._versions.write(ticket.version, write)
        return Sent(size, wire_s=time.perf_counter() - began - waited_s(weights))

    def whole(self, version: int) -> Ticket:
        return DiskTicket(version, self._versions.path(version))

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def read_folder(ticket: DiskTicket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version.

    Raises:
        TransportError: if a file is missing or damaged.
    """
    try:
        yield from read_weights(ticket.folder)
    except (ValueError, OSError) as error:
        raise TransportError(f"{error}") from error
