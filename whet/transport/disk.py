"""The transport over a file system: each version is a folder in Hugging Face format, which anything else can read, too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from whet.transport.adapter import AdapterWriter
from whet.transport.base import AdapterTicket, DiskTicket, Sent, Ticket, waited_s
from whet.transport.folder import FolderWriter
from whet.transport.versions import Versions


class DiskSender:
    """Writes whole folders.

    Args:
        folder: folder of the versions, on a file system that the engines share.
        keep: number of versions that stay.
        timeout_s: seconds that an engine may take.
        writer: writer of the folders: of whole models, or of adapters.
    """

    simultaneous = False

    def __init__(self, folder: Path, keep: int, timeout_s: float, writer: FolderWriter | AdapterWriter) -> None:
        self._versions, self.timeout_s, self._writer = Versions(folder, keep), timeout_s, writer

    def begin(self, version: int, receivers: Sequence[str]) -> Ticket:
        return self.whole(version)

    def send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]]) -> Sent:
        began = time.perf_counter()
        size = self._versions.write(ticket.version, lambda folder: self._writer.write(folder, weights))
        return Sent(size, wire_s=time.perf_counter() - began - waited_s(weights))

    def whole(self, version: int) -> Ticket:
        ticket = AdapterTicket if isinstance(self._writer, AdapterWriter) else DiskTicket
        return ticket(version, self._versions.path(version))

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass
