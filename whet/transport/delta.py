"""The transport of differences: only what changed since the version before is written, compressed, each tensor with a checksum.

The sender keeps the version before in the CPU's memory, and so can give a whole one to an engine that has another base.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from whet.files import sync_file
from whet.model.shards import whole
from whet.transport.base import DeltaTicket, DiskTicket, Sent, Ticket, TransportError, waited_s
from whet.transport.changes import Change, apply_change, change_of
from whet.transport.folder import FolderWriter, check_seen
from whet.transport.versions import Versions

HEADER, CHANGES = "changes.json", "changes.bin"


class DeltaSender:
    """Writes what changed.

    Args:
        folder: folder of the versions, on a file system that the engines share.
        keep: number of versions that stay, of changes and of whole ones each.
        timeout_s: seconds that an engine may take.
        writer: writer of folders with whole versions.
    """

    simultaneous = False

    def __init__(self, folder: Path, keep: int, timeout_s: float, writer: FolderWriter) -> None:
        self._whole, self._changes = Versions(folder, keep), Versions(folder, keep, ".delta")
        self.timeout_s, self._writer = timeout_s, writer
        self._held: dict[str, Tensor] = {}
        """The weights of `_version`; what is being sent takes their place tensor by tensor."""
        self._version: int | None = None
        self._writing = threading.Lock()
        """Lock for writing a whole version: several engines may ask for it at once."""

    def begin(self, version: int, receivers: Sequence[str]) -> Ticket:
        if self._version is None:
            return DiskTicket(version, self._whole.path(version))
        return DeltaTicket(version, self._version, self._changes.path(version))

    def send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]]) -> Sent:
        began = time.perf_counter()
        with self._writing:
            return self._send(ticket, weights, began)

    def _send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]], began: float) -> Sent:
        self._version = None  # until all of it is there, what is held is of no version
        if isinstance(ticket, DeltaTicket):
            size, encode_s = self._changes.write(ticket.version, lambda folder: self._write_changes(folder, ticket, weights))
        else:
            self._held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}
            size, encode_s = self._write_whole(ticket.version), 0.0
        self._version = ticket.version
        return Sent(size, encode_s, time.perf_counter() - began - waited_s(weights) - encode_s)

    def whole(self, version: int) -> Ticket:
        with self._writing:
            if self._version != version:
                raise TransportError(f"the weights of version {version} are not there any more")
            if not self._whole.path(version).is_dir():
                self._write_whole(version)
            return DiskTicket(version, self._whole.path(version))

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        self._held, self._version = {}, None

    def _write_whole(self, version: int) -> int:
        return self._whole.write(version, lambda folder: self._writer.write(folder, self._held.items()))

    def _write_changes(self, folder: Path, ticket: DeltaTicket, weights: Iterable[tuple[str, Tensor]]) -> tuple[int, float]:
        """Returns bytes written, and seconds of comparing and compressing."""
        entries: dict[str, Any] = {}
        start, encode_s = 0, 0.0
        with open(folder / CHANGES, "wb") as file:
            for name, tensor in weights:
                began = time.perf_counter()
                new, old = tensor.detach().cpu(), self._held.get(name)
                if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                    raise ValueError(f"{name} is not a weight of version {ticket.base}, which the changes are against")
                change = change_of(old, new)
                encode_s += time.perf_counter() - began
                old.copy_(new)
                file.write(change.packed)
                fields = {key: value for key, value in asdict(change).items() if key != "packed"}
                entries[name] = {**fields, "start": start, "size": len(change.packed)}
                start += len(change.packed)
        sync_file(folder / CHANGES)
        if lacking := sorted(self._held.keys() - entries.keys()):
            raise ValueError(f"version {ticket.version} lacks {len(lacking)} weights of version {ticket.base}, among them {lacking[0]}")
        header = json.dumps({"version": ticket.version, "base": ticket.base, "tensors": entries})
        (folder / HEADER).write_text(header)
        return start + len(header), encode_s


def read_changes(ticket: DeltaTicket, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version, from those of its base.

    Args:
        ticket: ticket of the version.
        held: the base's tensors, each of which may be overwritten once what follows from it was given; of those that are spread over ranks,
            all ranks call this.

    Raises:
        TransportError: naming the tensor, if what was written is missing, damaged, or of another version.
    """
    check_seen(ticket.folder)
    try:
        header = json.loads((ticket.folder / HEADER).read_text())
        if (header["version"], header["base"]) != (ticket.version, ticket.base):
            found = f"from version {header['base']} to {header['version']}"
            raise TransportError(f"{ticket.folder} has the changes {found}, not from version {ticket.base} to {ticket.version}")
        with open(ticket.folder / CHANGES, "rb") as file:
            for name, entry in header["tensors"].items():
                file.seek(entry["start"])
                packed = file.read(entry["size"])
                yield name, _changed(name, packed, entry, held)
    except (OSError, ValueError, KeyError) as error:
        raise TransportError(f"{ticket.folder} cannot be read: {type(error).__name__}: {error}") from error


def _changed(name: str, packed: bytes, entry: Mapping[str, Any], held: Mapping[str, Tensor]) -> Tensor:
    if name not in held:
        raise TransportError(f"{name} is not a weight of this engine")
    change = Change(entry["kind"], entry["num_changed"], packed, entry["raw_size"], entry["checksum"])
    old = whole(held[name]).detach()
    try:
        return apply_change(old.cpu(), change)
    except (ValueError, OSError) as error:
        raise TransportError(f"{name}: {error}") from error
