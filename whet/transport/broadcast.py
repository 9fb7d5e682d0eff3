"""The transport over a process group of its own: one sender, every process of every engine, buckets of tensors one after another.

While a bucket is on its way, the next is put together. The group has nothing to do with torch's default group: trainer and engines may
have others, and engines may come and go from version to version.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whet.transport.base import BroadcastTicket, Sent, SentOnce, Ticket, TransportError, waited_s
from whet.transport.buckets import Bucket, buckets, unpacked
from whet.transport.group import Pending, WeightGroup, join
from whet.transport.rendezvous import Rendezvous, exchanging

END, CUT = -1, -2
"""In place of a bucket's size: nothing more comes; the sender cannot go on."""


class BroadcastSender:
    """Sends buckets to all engines at once.

    Args:
        host: this machine's address, as the engines know it.
        timeout_s: seconds that a message, or an engine, may take.
        max_buffer_bytes: of the two buckets that there are at a time; a tensor that is larger goes alone, without a bucket.
        backend: gloo; ipc, where all are on one machine and open each other's memory; or nccl, where the weights and all engines are on
            CUDA devices of their own (never run).
    """

    simultaneous = True

    def __init__(self, host: str, timeout_s: float, max_buffer_bytes: int, backend: str = "gloo") -> None:
        self.timeout_s = timeout_s
        self._host, self._backend, self._bucket_bytes = host, backend, max_buffer_bytes // 2
        self._store: TCPStore | None = None
        self._group: WeightGroup | None = None
        self._members: tuple[str, ...] = ()
        self._number = 0
        self._rendezvous: Rendezvous | None = None
        self._given_up = threading.Event()
        self._sending = threading.Lock()

    def begin(self, version: int, receivers: Sequence[str]) -> Ticket:
        self._given_up.clear()
        if self._store is None:
            timeout = timedelta(seconds=self.timeout_s)
            listener = socket.create_server((self._host, 0))  # torch's own would listen to every interface
            port = listener.getsockname()[1]
            self._store = TCPStore(
                self._host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
            )
        if self._group is None or tuple(receivers) != self._members:
            self._leave()
            self._number += 1
            self._members = tuple(receivers)
        return BroadcastTicket(
            version, self._host, self._store.port, self._number, self._members, self._backend, self.timeout_s
        )

    def send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]]) -> Sent:
        assert isinstance(ticket, BroadcastTicket) and self._store is not None, "begin comes first"
        began = time.perf_counter()
        with self._sending:
            rendezvous = self._rendezvous = Rendezvous(self._store, ticket)
            size_bytes = self._attempt(rendezvous, ticket, weights)
            if isinstance(size_bytes, str):
                raise TransportError(
                    f"version {ticket.version}: the broadcast broke off, as far as can be told by {rendezvous.slowest}: {size_bytes}"
                )
            return Sent(size_bytes, wire_s=time.perf_counter() - began - waited_s(weights))

    def _attempt(self, rendezvous: Rendezvous, ticket: BroadcastTicket, weights: Iterable[tuple[str, Tensor]]) -> int | str:
        """Bytes sent, or why they were not: as text, for an exception would keep the group alive, whose end the engines wait for."""
        assert self._store is not None
        try:
            rendezvous.gather(self._given_up)
            if self._group is None:
                with exchanging():
                    self._group = join(self._store, ticket, 0)
            sending = _Sending(self._group)
            self._send_all(sending, weights)
            rendezvous.wait_for_all(self._given_up)
        except ConnectionError as error:
            return str(error)
        return sending.size_bytes

    def _send_all(self, sending: _Sending, weights: Iterable[tuple[str, Tensor]]) -> None:
        try:
            for bucket in buckets(weights, self._bucket_bytes):
                sending.put(bucket)
        except ConnectionError:
            raise
        except BaseException:  # the weights cannot be put together: nobody needs to wait for the rest
            with suppress(ConnectionError):
                sending.close(CUT)
            raise
        sending.close(END)

    def whole(self, version: int) -> Ticket:
        raise SentOnce(f"version {version} was broadcast to the engines of then; one that comes later waits for the next version")

    def give_up(self) -> None:
        self._given_up.set()
        if self._sending.acquire(blocking=False):  # else `send` ends soon, and this is called again
            self._leave()
            self._sending.release()

    def close(self) -> None:
        self._leave()
        self._store = None

    def _leave(self) -> None:
        """The engines that wait for this one see it."""
        self._group = None
        if self._rendezvous is not None:
            self._rendezvous.call_off()
            self._rendezvous = None


class _Sending:
    """A bucket is on its way while the next is made."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self._under_way: list[Pending] = []
        self.size_bytes = 0

    def put(self, bucket: Bucket) -> None:
        self._wait()
        header = torch.frombuffer(bytearray(bucket.header), dtype=torch.uint8)
        self._start(torch.tensor([bucket.data.numel(), header.numel()]))
        self._start(header)
        if bucket.data.numel():
            with exchanging():
                self._under_way += self._group.give(bucket.data)
        self.size_bytes += bucket.data.numel()

    def close(self, how: int) -> None:
        self._wait()
        self._start(torch.tensor([how, 0]))
        self._wait()

    def _start(self, tensor: Tensor) -> None:
        tensor = tensor.to(self._group.device)
        with exchanging():
            self._under_way.append((self._group.broadcast(tensor), tensor))

    def _wait(self) -> None:
        with exchanging():
            for work, _ in self._under_way:
                work.wait()
        self._under_way.clear()


class BroadcastReceiver:
    """An engine's end: keeps its place in the group from version to version.

    Args:
        name: as the sender knows it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._group: WeightGroup | None = None
        self._joined: tuple[str, int, int] | None = None

    def open(self, ticket: BroadcastTicket) -> Iterator[tuple[str, Tensor]]:
        """The version's tensors, each whole.

        Raises:
            TransportError: if they do not come.
        """
        finished = False
        try:
            where = (ticket.host, ticket.port, ticket.group)
            with exchanging():
                store = TCPStore(ticket.host, ticket.port, is_master=False, timeout=timedelta(seconds=ticket.timeout_s))
            rendezvous = Rendezvous(store, ticket)
            rendezvous.come(self._name)
            if self._joined != where or self._group is None:
                with exchanging():
                    self._group, self._joined = join(store, ticket, 1 + ticket.receivers.index(self._name)), where
            for number, bucket in enumerate(_received(self._group)):
                yield from unpacked(bucket)
                rendezvous.got(self._name, number + 1)
            rendezvous.done(self._name)
            finished = True
        except ConnectionError as error:
            raise TransportError(f"the broadcast broke off: {error}") from error
        finally:
            if not finished:
                self.close()

    def close(self) -> None:
        self._group, self._joined = None, None


def _received(group: WeightGroup) -> Iterator[Bucket]:
    while True:
        num_bytes, num_header = _fill(group, torch.zeros(2, dtype=torch.int64, device=group.device)).tolist()
        if num_bytes == END:
            return
        if num_bytes == CUT:
            raise TransportError("the trainer broke off the stream of its weights")
        header = _fill(group, torch.empty(num_header, dtype=torch.uint8, device=group.device))
        if not num_bytes:
            yield Bucket(bytes(header.tolist()), torch.empty(0, dtype=torch.uint8))
            continue
        with exchanging():
            data = group.take(num_bytes)
        yield Bucket(bytes(header.tolist()), data)
        del data
        with exchanging():
            group.taken()


def _fill(group: WeightGroup, tensor: Tensor) -> Tensor:
    with exchanging():
        group.broadcast(tensor).wait()
    return tensor
