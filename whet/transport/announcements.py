"""Messages between the sender of a broadcast to servers and the clients of those servers, through a store of torch's.

A server's own routes learn from a call what is broadcast next. So the sender announces each bucket, the client of each server
passes that on, and the next bucket is sent when all servers have loaded the last. Every wait here ends when somebody gives up.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whet.transport.base import ServerBroadcastTicket
from whet.transport.rendezvous import POLL_S, exchanging

END = "null"
"""In place of a bucket: nothing more comes."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Tensors of a bucket, in the order that they are broadcast in."""

    names: list[str]
    dtypes: list[str]
    """torch's names without `torch.`."""
    shapes: list[list[int]]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Tensor]]) -> BucketLayout:
        kinds = [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors]
        return cls([name for name, _ in tensors], kinds, [list(tensor.shape) for _, tensor in tensors])


def _store_of(store: Store, ticket: ServerBroadcastTicket) -> PrefixStore:
    return PrefixStore(f"whet/{ticket.serial}", store)


class Announcer:
    """The sender's end of one broadcast.

    Args:
        store: the store that all reach.
        ticket: the broadcast's.
        given_up: set when nobody needs to be waited for any more.
    """

    def __init__(self, store: Store, ticket: ServerBroadcastTicket, given_up: threading.Event) -> None:
        self._store, self._ticket, self._given_up = _store_of(store, ticket), ticket, given_up

    def gather(self) -> set[str]:
        """Wait until all receivers have come; the groups that they are in."""
        self._wait_for("group", "not all came")
        with exchanging():
            return {self._store.get(f"group/{name}").decode() for name in self._ticket.receivers}

    def begin(self, group: str) -> None:
        """Have all join a group, by the port where it meets, unless they are in it, and open their updates."""
        with exchanging():
            self._store.set("begin", group)

    def wait_until_ready(self) -> None:
        """Wait until all have opened their updates."""
        self._wait_for("ready", "not all joined the group and opened an update")

    def announce(self, number: int, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Announce a bucket; an empty one is the end."""
        with exchanging():
            self._store.set(f"bucket/{number}", json.dumps(asdict(BucketLayout.of(tensors))) if tensors else END)

    def wait_until_loaded(self, number: int) -> None:
        """Wait until all have loaded a bucket."""
        self._wait_for(f"loaded/{number}", f"bucket {number + 1} was not loaded by all")

    def wait_until_done(self) -> None:
        self._wait_for("done", "not all ended the update")

    def call_off(self) -> None:
        """Release everybody who waits."""
        with suppress(RuntimeError):  # the store is gone, and everybody sees it
            self._store.set("off", "")

    @property
    def slowest(self) -> str:
        """The receivers that are behind the others."""
        try:
            reached = {name: self._reached(name) for name in self._ticket.receivers}
        except ConnectionError as error:
            return f"all servers ({error})"
        return ", ".join(name for name in reached if reached[name] == min(reached.values()))

    def _reached(self, name: str) -> int:
        """Milestones of a receiver: 0 until it came."""
        with exchanging():
            if self._store.check([f"done/{name}"]):
                return 2**31
            count = sum(self._store.check([f"{what}/{name}"]) for what in ("group", "ready"))
            while self._store.check([f"loaded/{count - 2}/{name}"]):
                count += 1
        return count

    def _wait_for(self, what: str, late: str) -> None:
        """Wait for a message of every receiver.

        Raises:
            ConnectionError: if it does not come in time, or somebody has given up.
        """
        deadline = time.monotonic() + self._ticket.timeout_s
        keys = [f"{what}/{name}" for name in self._ticket.receivers]
        while True:
            with exchanging():
                if self._store.check(keys):
                    return
            if time.monotonic() > deadline:
                raise ConnectionError(f"{late} within {self._ticket.timeout_s:g} s (sync.timeout_s)")
            if self._given_up.wait(POLL_S):
                raise ConnectionError("a server ended, or cannot take the weights over")


class Listener:
    """A server's client in one broadcast. It speaks for all processes of the server.

    Args:
        ticket: the broadcast's.
        receivers: names of the server's processes among those of the ticket.
    """

    def __init__(self, ticket: ServerBroadcastTicket, receivers: Iterable[str]) -> None:
        self._receivers, self.timeout_s = list(receivers), ticket.timeout_s
        with exchanging():
            store = TCPStore(ticket.host, ticket.port, is_master=False, timeout=timedelta(seconds=ticket.timeout_s))
        self._store = _store_of(store, ticket)

    async def come(self, group: str) -> str:
        """Say that the server is there, and in which group, "": in none; wait for all, and return the group to be in, by its port."""
        self._say("group", group)
        return await self._read("begin")

    def ready(self) -> None:
        """Say that the server is in the group and has opened an update."""
        self._say("ready", "")

    async def buckets(self) -> AsyncIterator[BucketLayout]:
        """Each bucket as it is announced; when the next is asked for, the last was loaded."""
        number = 0
        while (announced := await self._read(f"bucket/{number}")) != END:
            yield BucketLayout(**json.loads(announced))
            self._say(f"loaded/{number}", "")
            number += 1

    def done(self) -> None:
        self._say("done", "")

    @property
    def is_off(self) -> bool:
        """True if somebody has given up, or the sender is gone."""
        try:
            with exchanging():
                return self._store.check(["off"])
        except ConnectionError:
            return True

    async def off(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody has given up; False: nobody did within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_off:
            if deadline is not None and time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _say(self, what: str, value: str) -> None:
        with exchanging():
            for name in self._receivers:
                self._store.set(f"{what}/{name}", value)

    async def _read(self, key: str) -> str:
        """Wait for a message of the sender.

        Raises:
            ConnectionError: if the broadcast is called off, or nothing is heard of the sender.
        """
        deadline = time.monotonic() + 2 * self.timeout_s  # the sender, which waits half of that, is the one who calls it off
        while True:
            with exchanging():
                if self._store.check([key]):
                    return self._store.get(key).decode()
            if self.is_off:
                raise ConnectionError("the sender has called it off")
            if time.monotonic() > deadline:
                raise ConnectionError("nothing was heard of the sender")
            await asyncio.sleep(POLL_S)
