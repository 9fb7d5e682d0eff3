"""A process group apart from torch's default one: the sender of weights and the processes of engines."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]

from whet.transport.base import BroadcastTicket
from whet.transport.handles import handed, opened

Pending = tuple[dist.Work, Tensor]
"""An exchange that is under way, and what has to be kept until it is done."""
SENDER = 0
"""The rank that sends."""
JOIN_TIMEOUT_S = 30.0
"""For those who are all there to connect to each other; meanwhile nobody looks whether one of them has gone."""


class WeightGroup:
    """The group's members, as one of them sees them.

    Args:
        group: a backend of torch's, of gloo or NCCL.
        device: device of the exchanged tensors.
        timeout: timeout of a message.
    """

    def __init__(self, group: Any, device: torch.device, timeout: timedelta) -> None:
        self._group, self.device, self._timeout = group, device, timeout

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Begin to send a tensor, or to receive one into it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = SENDER, self._timeout
        return self._group.broadcast([tensor], options)

    def give(self, data: Tensor) -> list[Pending]:
        """Begin to have all others take bytes."""
        data = data.to(self.device)
        return [(self.broadcast(data), data)]

    def take(self, num_bytes: int) -> Tensor:
        """Bytes from the sender, valid until `taken`. [bytes] uint8"""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.broadcast(data).wait()
        return data

    def taken(self) -> None:
        """Say that it is not needed any more."""


class IpcGroup(WeightGroup):
    """A group on one machine, whose bytes stay where they are: the others open the sender's memory."""

    def give(self, data: Tensor) -> list[Pending]:
        description, kept = handed(data)
        encoded = torch.frombuffer(bytearray(description), dtype=torch.uint8)
        size = torch.tensor([encoded.numel()])
        return [(self.broadcast(size), size), (self.broadcast(encoded), encoded), (self._meet(), kept)]

    def take(self, num_bytes: int) -> Tensor:
        size = torch.zeros(1, dtype=torch.int64)
        self.broadcast(size).wait()
        encoded = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(encoded).wait()
        return opened(bytes(encoded.tolist()))

    def taken(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was copied from it was copied
        self._meet().wait()

    def _meet(self) -> dist.Work:
        """Begin to wait for all."""
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        return self._group.allreduce([torch.zeros(1)], options)


def join(store: Store, ticket: BroadcastTicket, rank: int) -> WeightGroup:
    """Connect to the others, which are all there.

    Raises:
        RuntimeError: if one of them is not, or not in time.
    """
    place, size = PrefixStore(f"group/{ticket.group}", store), 1 + len(ticket.receivers)
    kind = IpcGroup if ticket.backend == "ipc" else WeightGroup
    return _connected(place, rank, size, ticket.backend, own_address(ticket.host, ticket.port), ticket.timeout_s, kind)


def join_by_name(store: Store, name: str, rank: int, size: int, backend: str, address: str, timeout_s: float) -> WeightGroup:
    """Connect to the others where `torch.distributed` looks for them when it makes a group of that name: SGLang's servers do so
    (`init_custom_process_group`).

    Args:
        store: the store that all of them reach.
        name: name of the group.
        rank: rank of this process.
        size: number of ranks.
        backend: gloo or nccl.
        address: this machine's, on the way to the others.
        timeout_s: seconds that a message may take.

    Raises:
        RuntimeError: as `join`.
    """
    place = PrefixStore(name, store)  # the caller's
    place = PrefixStore(f"{name}/", place)  # torch's, for the group
    place = PrefixStore("cuda/" if backend == "nccl" else "cpu/", place)  # and for the first device of its backend
    return _connected(place, rank, size, backend, address, timeout_s, WeightGroup)


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _connected(
    place: Store, rank: int, size: int, backend: str, address: str, timeout_s: float, kind: type[WeightGroup]
) -> WeightGroup:
    timeout, joining = timedelta(seconds=timeout_s), timedelta(seconds=min(JOIN_TIMEOUT_S, timeout_s))
    if backend == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
        chosen = dist.ProcessGroupNCCL.Options()
        chosen._timeout = timeout
        return WeightGroup(dist.ProcessGroupNCCL(place, rank, size, chosen), device, timeout)
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=address)], joining
    return kind(ProcessGroupGloo(place, rank, size, options), torch.device("cpu"), timeout)
