"""An engine's end of every transport: from a ticket to a stream of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from whet.model.decoder import DecoderModel
from whet.model.naming import Naming
from whet.transport.base import (
    AdapterTicket,
    BroadcastTicket,
    DeltaTicket,
    DiskTicket,
    OtherBase,
    ServerBroadcastTicket,
    SharedTicket,
    Ticket,
)
from whet.transport.broadcast import BroadcastReceiver
from whet.transport.delta import read_changes
from whet.transport.folder import read_folder


class Receiver:
    """Opens tickets in a process of an engine.

    Args:
        name: the process's, as the sender knows it.
        mapped: the model over the memory that a `SharedSender` writes to, where that is the transport.
        held: the weights that this process holds now, as changes apply to them.
        naming: names of the model's tensors in folders.
    """

    def __init__(
        self, name: str, mapped: DecoderModel | None, held: Callable[[], Mapping[str, Tensor]], naming: Callable[[], Naming]
    ) -> None:
        self._mapped, self._held, self._naming = mapped, held, naming
        self._broadcast = BroadcastReceiver(name)

    def check(self, ticket: Ticket, version: int | None) -> None:
        """Refuse changes against another version than is held; None: half of one.

        Raises:
            OtherBase: if they are.
        """
        if isinstance(ticket, DeltaTicket) and ticket.base != version:
            holds = "half of a version" if version is None else f"version {version}"
            raise OtherBase(f"the changes are against version {ticket.base}, and this engine holds {holds}")

    def open(self, ticket: Ticket) -> Iterator[tuple[str, Tensor]]:
        """The version's tensors, each whole; one is good until the next is read.

        Raises:
            TransportError: if they do not come, or are damaged.
        """
        match ticket:
            case SharedTicket():
                assert self._mapped is not None, "this engine was given no memory that new weights are put into"
                return self._mapped.named_weights()
            case BroadcastTicket():
                return self._broadcast.open(ticket)
            case ServerBroadcastTicket() | AdapterTicket():
                raise AssertionError("servers alone take it, by their own routes")
            case DiskTicket():
                return read_folder(ticket, self._naming())
            case DeltaTicket():
                return read_changes(ticket, self._held())

    def close(self) -> None:
        self._broadcast.close()
