"""The transport over a process group to servers that take a broadcast by routes of their own, such as SGLang's.

The trainer is rank 0, and each process of each server one of the others. Tensors travel one by one, named and cut as in Hugging Face files,
in buckets that are announced (`announcements.py`): so much is in flight at a time, and a server that fails is noticed at its bucket.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whet.transport.announcements import Announcer
from whet.transport.base import Sent, SentOnce, ServerBroadcastTicket, Ticket, TransportError, waited_s
from whet.transport.group import JOIN_TIMEOUT_S, WeightGroup, join_by_name, own_address
from whet.transport.rendezvous import POLL_S, exchanging

T = TypeVar("T")
GROUP = "whet"
"""Name of the group at the servers. Each group meets at a store of its own, so that one name will do, and a server can be rid of the group
that an earlier run left there."""
ToFiles = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""Cuts one of the model's weights into the tensors that files have of it (`Naming.to_files`)."""


class ServerBroadcastSender:
    """Sends buckets to all servers at once.

    Args:
        host: this machine's address, as the servers know it.
        timeout_s: seconds that a message, or a server, may take.
        max_buffer_bytes: of the two buckets that there are at a time, one on its way and one that is put together; a tensor that is larger
            is a bucket by itself.
        backend: gloo; nccl, where the weights and all servers are on CUDA devices of their own (never run).
        to_files: cuts weights into the tensors of files.
    """

    simultaneous = True

    def __init__(self, host: str, timeout_s: float, max_buffer_bytes: int, backend: str, to_files: ToFiles) -> None:
        self.timeout_s = timeout_s
        self._host, self._backend, self._bucket_bytes, self._to_files = host, backend, max_buffer_bytes // 2, to_files
        self._store: TCPStore | None = None
        """For announcements."""
        self._place: TCPStore | None = None
        """The store where the group meets."""
        self._group: WeightGroup | None = None
        self._members: tuple[str, ...] = ()
        self._serial = 0
        self._announcer: Announcer | None = None
        self._given_up = threading.Event()
        self._sending = threading.Lock()

    def begin(self, version: int, receivers: Sequence[str]) -> Ticket:
        self._given_up.clear()
        if self._store is None:
            self._store = self._new_store()
        self._serial += 1
        return ServerBroadcastTicket(version, self._host, self._store.port, self._serial, tuple(receivers), self._backend, self.timeout_s)

    def send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]]) -> Sent:
        assert isinstance(ticket, ServerBroadcastTicket) and self._store is not None, "begin comes first"
        began = time.perf_counter()
        with self._sending:
            announcer = self._announcer = Announcer(self._store, ticket, self._given_up)
            size_bytes = self._attempt(announcer, ticket, weights)
            if isinstance(size_bytes, str):
                slowest = announcer.slowest
                raise TransportError(f"version {ticket.version}: the broadcast broke off, as far as can be told by {slowest}: {size_bytes}")
            return Sent(size_bytes, wire_s=time.perf_counter() - began - waited_s(weights))

    def whole(self, version: int) -> Ticket:
        raise SentOnce(f"version {version} was broadcast to the servers of then; one that comes later waits for the next version")

    def give_up(self) -> None:
        self._given_up.set()
        if self._announcer is not None:
            self._announcer.call_off()
        if self._sending.acquire(blocking=False):  # else `send` ends soon, and this is called again
            self._leave()
            self._sending.release()

    def close(self) -> None:
        self._leave()

    def _attempt(self, announcer: Announcer, ticket: ServerBroadcastTicket, weights: Iterable[tuple[str, Tensor]]) -> int | str:
        """Bytes sent, or why they were not: as text, for an exception would keep the group alive, whose end the servers wait for."""
        try:
            self._meet(announcer, ticket)
            size_bytes = self._send_all(announcer, weights)
            announcer.wait_until_done()
        except ConnectionError as error:
            return str(error)
        return size_bytes

    def _meet(self, announcer: Announcer, ticket: ServerBroadcastTicket) -> None:
        """Have all servers in one group with this process: the last broadcast's if every one of them is still in it, or else a new one."""
        receivers = ticket.receivers
        there = announcer.gather()
        if self._group is None or self._place is None or there != {str(self._place.port)} or receivers != self._members:
            self._group, self._members = None, receivers
            place = self._place = self._new_store()
            announcer.begin(str(place.port))
            address = own_address(ticket.host, place.port)
            self._group = self._bounded(
                lambda: join_by_name(place, GROUP, 0, 1 + len(receivers), ticket.backend, address, ticket.timeout_s),
                min(JOIN_TIMEOUT_S, self.timeout_s),
            )
        else:
            announcer.begin(str(self._place.port))
        announcer.wait_until_ready()

    def _send_all(self, announcer: Announcer, weights: Iterable[tuple[str, Tensor]]) -> int:
        group, size_bytes, number = self._group, 0, -1
        assert group is not None, "it was joined"
        for number, bucket in enumerate(self._buckets(weights)):
            if number:
                announcer.wait_until_loaded(number - 1)
            announcer.announce(number, bucket)
            self._bounded(lambda bucket=bucket: _broadcast(group, bucket), self.timeout_s)
            size_bytes += sum(tensor.nbytes for _, tensor in bucket)
        if number >= 0:
            announcer.wait_until_loaded(number)
        announcer.announce(number + 1, [])
        return size_bytes

    def _buckets(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        """Tensors of files in their order, as many as a bucket may have."""
        waiting: list[tuple[str, Tensor]] = []
        size = 0
        for file, tensor in (part for name, weight in weights for part in self._to_files(name, weight.detach())):
            if waiting and size + tensor.nbytes > self._bucket_bytes:
                yield waiting
                waiting, size = [], 0
            waiting.append((file, tensor.contiguous()))
            size += tensor.nbytes
        if waiting:
            yield waiting

    def _bounded(self, work: Callable[[], T], timeout_s: float) -> T:
        """The result of an exchange, which nobody can end: on a thread of its own, that is left behind when it takes too long.

        Raises:
            ConnectionError: if it fails, takes longer than `timeout_s`, or somebody has given up.
        """
        found: list[T] = []
        why: list[str] = []
        over = threading.Event()
        devices = [torch.cuda.current_device()] if self._backend == "nccl" else []

        def run() -> None:
            try:
                for device in devices:
                    torch.cuda.set_device(device)
                with exchanging():
                    found.append(work())
            except Exception as error:  # whatever torch raises; as text, which keeps nothing alive
                why.append(f"{error}")
            finally:
                over.set()

        threading.Thread(target=run, name="broadcast", daemon=True).start()
        deadline = time.monotonic() + timeout_s + 1.0  # torch's own deadline says more
        while not over.wait(POLL_S):
            if self._given_up.is_set():
                raise ConnectionError("a server ended, or cannot take the weights over")
            if time.monotonic() > deadline:
                raise ConnectionError(f"an exchange took longer than {timeout_s:g} s")
        if why:
            raise ConnectionError(why[0])
        return found[0]

    def _new_store(self) -> TCPStore:
        timeout = timedelta(seconds=self.timeout_s)
        listener = socket.create_server((self._host, 0))  # torch's own would listen to every interface
        port = listener.getsockname()[1]
        return TCPStore(self._host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach())

    def _leave(self) -> None:
        """End the group, and the store with it: servers that wait at either see it."""
        if self._announcer is not None:
            self._announcer.call_off()
        self._announcer = self._group = self._place = self._store = None
        self._members = ()


def _broadcast(group: WeightGroup, bucket: Sequence[tuple[str, Tensor]]) -> None:
    """Send the tensors of a bucket, and wait until they are sent."""
    sent = [tensor.to(group.device) for _, tensor in bucket]
    for work in [group.broadcast(tensor) for tensor in sent]:
        work.wait()
    if group.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
