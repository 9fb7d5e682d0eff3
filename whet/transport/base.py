"""Transfer of weights from a trainer to engines. The sender issues a ticket; each engine opens it and
reads a stream of named tensors.

Backends give such streams, transports carry them, engines take them over: none of the three knows which
of the others it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


class TransportError(RuntimeError):
    """Weights did not arrive: cut in the middle, too late, or other bits than were sent. Who was taking them over holds half of them."""


class SentOnce(TransportError):
    """The present version is no longer available: a late engine waits for the next one."""


class OtherBase(ValueError):
    """The weights were sent as changes against another version than this engine holds. Nothing was
    changed; the engine needs the whole weights."""


class Stream:
    """Weights one after another, named as in Hugging Face files. They are read once, to the end, and a reader keeps none of them, so that
    the whole model is never held for them."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = iter(weights)
        self.waited_s = 0.0
        """Seconds that readers waited for tensors to be made."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            began = time.perf_counter()
            found = next(self._weights, None)
            self.waited_s += time.perf_counter() - began
            if found is None:
                return
            yield found


def waited_s(weights: Iterable[tuple[str, Tensor]]) -> float:
    """Seconds that readers of a stream have waited so far; what is there already is not waited for."""
    return weights.waited_s if isinstance(weights, Stream) else 0.0


@dataclass(frozen=True, slots=True)
class SharedTicket:
    """The weights lie in the memory that the engine was given when it began."""

    version: int


@dataclass(frozen=True, slots=True)
class BroadcastTicket:
    """The weights come through a process group, which the engines of `receivers` join."""

    version: int
    host: str
    port: int
    """Port of the store (torch's) where the group meets."""
    group: int
    """Number of the group. A group serves many versions, until its engines change."""
    receivers: tuple[str, ...]
    """Names of the engines' processes, in the order of their ranks: the first is rank 1."""
    backend: str
    """gloo; ipc: gloo, and bytes stay where they are, for others on the machine to open; nccl, where all tensors are on CUDA."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ServerBroadcastTicket:
    """The weights come through a process group that servers join by their own routes, named and cut as in Hugging Face files."""

    version: int
    host: str
    port: int
    """Port of the store (torch's) where the group meets, and where buckets are announced."""
    serial: int
    """Number of the broadcast at this store."""
    receivers: tuple[str, ...]
    """As in `BroadcastTicket`."""
    backend: str
    """gloo, or nccl, where the trainer and all servers are on CUDA devices of their own."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class DiskTicket:
    """The weights lie in a folder in Hugging Face format."""

    version: int
    folder: Path


@dataclass(frozen=True, slots=True)
class AdapterTicket:
    """An adapter is in a folder, as peft writes it; the weights below it stay."""

    version: int
    folder: Path


@dataclass(frozen=True, slots=True)
class DeltaTicket:
    """A folder with the changes since another version."""

    version: int
    base: int
    folder: Path


Ticket = SharedTicket | BroadcastTicket | ServerBroadcastTicket | DiskTicket | AdapterTicket | DeltaTicket
"""Data that an engine needs to fetch one version: small and picklable."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Size and times of a transfer."""

    size_bytes: int
    """Bytes that left this process, each counted once for any number of engines."""
    encode_s: float = 0.0
    """Seconds of packing and compressing."""
    wire_s: float = 0.0
    """Seconds of copying, writing or sending, as far as it held up the stream."""


class Sender(Protocol):
    """The trainer's end of a transport. `begin`, then `send`; engines open the ticket meanwhile, or afterwards."""

    simultaneous: bool
    """True if engines must open the ticket while it sends; otherwise the data stays, and they open it
    afterwards."""
    timeout_s: float
    """Seconds that an engine may take."""

    def begin(self, version: int, receivers: Sequence[str]) -> Ticket:
        """Announce a version.

        Args:
            version: version of the weights.
            receivers: a name for every process that will open the ticket, and a new name after a
                restart.
        """
        ...

    def send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]]) -> Sent:
        """Read the stream to its end and send it. Blocks. When it fails, `give_up` comes next.

        Raises:
            ValueError: if the weights are of another model; nothing was changed then.
            TransportError: if they cannot be sent; it names the tensor, or the engine, and the version.
        """
        ...

    def whole(self, version: int) -> Ticket:
        """A ticket for all present weights, for an engine that holds others than the rest, such as a
        new one.

        Raises:
            SentOnce: if there is none, and the engine has to wait for the next version.
            TransportError: if it cannot be written, for example.
        """
        ...

    def give_up(self) -> None:
        """This version fails: wait for its engines no longer, and have none of them wait. Called when one of them fails, while `send`
        blocks elsewhere, and when `send` has failed, once it is noted why: what the engines say then follows from it."""
        ...

    def close(self) -> None: ...

