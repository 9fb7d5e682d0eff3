"""The transport over a process group of its own: one sender, every process of every engine, buckets of tensors one after another.

A bucket is a header (JSON: names, types, shapes) and bytes; while one is on its way, the next is put together. The group has nothing to do
with torch's default group: trainer and engines may have others, and engines may come and go from version to version.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whet.transport.base import BroadcastTicket, Sent, Ticket, TransportError, waited_s
from whet.transport.group import Group, join

ALIGN = 16
"""Tensors in a bucket begin at multiples of so many bytes, so that they can be viewed as any type."""
POLL_S = 0.01
"""Between looks at who has got everything."""
END, CUT = -1, -2
"""In place of a bucket's size: nothing more comes; the sender cannot go on."""


class BroadcastSender:
    """Sends buckets to all engines at once.

    Args:
        host: this machine's address, as the engines know it.
        timeout_s: how long a message, or an engine, may take.
        max_buffer_bytes: of the two buckets that there are at a time; a tensor that is larger goes alone, without a bucket.
        backend: gloo, or nccl where the weights and all engines are on CUDA devices of their own (never run).
    """

    simultaneous = True

    def __init__(self, host: str, timeout_s: float, max_buffer_bytes: int, backend: str = "gloo") -> None:
        self.timeout_s = timeout_s
        self._host, self._backend, self._bucket_bytes = host, backend, max_buffer_bytes // 2
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._members: tuple[str, ...] = ()
        self._number = 0
        self._given_up = threading.Event()

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
        store = PrefixStore(f"{ticket.group}/{ticket.version}", self._store)
        try:
            size_bytes = self._attempt(store, ticket, weights)
        except BaseException:
            self._leave()
            raise
        if isinstance(size_bytes, str):
            self._leave()
            who = self._slowest(store, ticket)
            raise TransportError(f"version {ticket.version}: the broadcast broke off, as far as can be told by {who}: {size_bytes}")
        return Sent(size_bytes, wire_s=time.perf_counter() - began - waited_s(weights))

    def _attempt(self, store: PrefixStore, ticket: BroadcastTicket, weights: Iterable[tuple[str, Tensor]]) -> int | str:
        """Bytes sent, or why they were not: as text, for an exception would keep the group alive, whose end the engines wait for."""
        assert self._store is not None
        try:
            if self._group is None:
                with exchanging():
                    self._group = join(self._store, ticket, 0)
            sending = _Sending(self._group)
            self._send_all(sending, weights)
            self._wait_for_all(store, ticket)
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
        raise TransportError(f"version {version} was broadcast to the engines of then; one that comes later waits for the next version")

    def give_up(self) -> None:
        self._given_up.set()

    def close(self) -> None:
        self._leave()
        self._store = None

    def _leave(self) -> None:
        self._group = None

    def _wait_for_all(self, store: PrefixStore, ticket: BroadcastTicket) -> None:
        """What was sent may still lie in the buffers of sockets."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            with exchanging():
                if store.check([f"done/{name}" for name in ticket.receivers]):
                    return
            if time.monotonic() > deadline:
                raise ConnectionError(f"not all of it was received within {self.timeout_s:g} s")
            if self._given_up.wait(POLL_S):
                raise ConnectionError("an engine ended")

    def _slowest(self, store: PrefixStore, ticket: BroadcastTicket) -> str:
        """The engines that got least, as far as the store knows."""
        try:
            got = {name: _count(store, name) for name in ticket.receivers}
        except RuntimeError as error:
            return f"all engines ({_first_line(error)})"
        return ", ".join(name for name in got if got[name] == min(got.values()))


@contextmanager
def exchanging() -> Iterator[None]:
    """What torch raises in here is of the exchange with others, and nothing else.

    Raises:
        ConnectionError: with torch's words.
    """
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(_first_line(error)) from error


def _count(store: PrefixStore, name: str) -> int:
    """Buckets that an engine got; -1: it has not come."""
    return int(store.get(f"got/{name}")) if store.check([f"got/{name}"]) else -1


@dataclass(slots=True)
class Bucket:
    """Tensors that travel together."""

    header: bytes
    """JSON: [name, dtype, shape, start] of each."""
    data: Tensor
    """[bytes] uint8"""


class _Sending:
    """A bucket is on its way while the next is made."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: list[tuple[dist.Work, Tensor]] = []
        self.size_bytes = 0

    def put(self, bucket: Bucket) -> None:
        self._wait()
        header = torch.frombuffer(bytearray(bucket.header), dtype=torch.uint8)
        self._start(torch.tensor([bucket.data.numel(), header.numel()]))
        self._start(header)
        if bucket.data.numel():
            self._start(bucket.data)
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
        self._group: Group | None = None
        self._joined: tuple[str, int, int] | None = None

    def open(self, ticket: BroadcastTicket) -> Iterator[tuple[str, Tensor]]:
        """The version's tensors, each whole.

        Raises:
            TransportError: if they do not come.
        """
        timeout = timedelta(seconds=ticket.timeout_s)
        finished = False
        try:
            where = (ticket.host, ticket.port, ticket.group)
            with exchanging():
                meeting = TCPStore(ticket.host, ticket.port, is_master=False, timeout=timeout)
                store = PrefixStore(f"{ticket.group}/{ticket.version}", meeting)
                store.set(f"got/{self._name}", "0")
                if self._joined != where or self._group is None:
                    self._group, self._joined = join(meeting, ticket, 1 + ticket.receivers.index(self._name)), where
            for number, bucket in enumerate(_received(self._group)):
                yield from _unpacked(bucket)
                with exchanging():
                    store.set(f"got/{self._name}", str(number + 1))
            with exchanging():
                store.set(f"done/{self._name}", "")
            finished = True
        except ConnectionError as error:
            raise TransportError(f"the broadcast broke off: {error}") from error
        finally:
            if not finished:
                self.close()

    def close(self) -> None:
        self._group, self._joined = None, None


def _received(group: Group) -> Iterator[Bucket]:
    while True:
        num_bytes, num_header = _fill(group, torch.zeros(2, dtype=torch.int64, device=group.device)).tolist()
        if num_bytes == END:
            return
        if num_bytes == CUT:
            raise TransportError("the trainer broke off the stream of its weights")
        header = _fill(group, torch.empty(num_header, dtype=torch.uint8, device=group.device))
        data = torch.empty(num_bytes, dtype=torch.uint8, device=group.device)
        yield Bucket(bytes(header.tolist()), _fill(group, data) if num_bytes else data)


def _fill(group: Group, tensor: Tensor) -> Tensor:
    with exchanging():
        group.broadcast(tensor).wait()
    return tensor


def _unpacked(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    for name, dtype, shape, start in json.loads(bucket.header):
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel() * kind.itemsize
        yield name, bucket.data[start : start + count].view(kind).view(shape)


def buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Tensors packed one behind the other until a bucket is full; one that is larger than a bucket goes alone and is not copied."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if size + tensor.nbytes > bucket_bytes and waiting:
            yield _packed(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += -(-tensor.nbytes // ALIGN) * ALIGN
    if waiting:
        yield _packed(waiting)


def _packed(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    entries: list[tuple[str, str, list[int], int]] = []
    start = 0
    for name, tensor in tensors:
        entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
        start += -(-tensor.nbytes // ALIGN) * ALIGN
    header = json.dumps(entries).encode()
    if len(tensors) == 1:
        return Bucket(header, as_bytes(tensors[0][1]))
    data = torch.zeros(start, dtype=torch.uint8, device=tensors[0][1].device)
    for (_, tensor), (_, _, _, place) in zip(tensors, entries, strict=True):
        data[place : place + tensor.nbytes] = as_bytes(tensor)
    return Bucket(header, data)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, in order. [bytes] uint8"""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
