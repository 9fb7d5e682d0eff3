"""Messages between the sender of a broadcast and its receivers, through a store of torch's: arrival,
progress and the end. Every wait here also checks whether another process has given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from whet.transport.base import BroadcastTicket

POLL_S = 0.01
"""Between two looks at what others have said."""


class Rendezvous:
    """The rendezvous of one version.

    Args:
        store: a store that all of them reach.
        ticket: ticket of the version.
    """

    def __init__(self, store: Store, ticket: BroadcastTicket) -> None:
        self._store, self._ticket = PrefixStore(f"{ticket.group}/{ticket.version}", store), ticket

    # A receiver's words.

    def come(self, name: str) -> None:
        """Say that one is there, and wait until all are.

        Raises:
            ConnectionError: if the sender calls it off, or is gone.
        """
        self.got(name, 0)
        deadline = time.monotonic() + 2 * self._ticket.timeout_s  # the sender, which waits half of that, is the one who calls it off
        while not self._is_set("go"):
            if self._is_set("off"):
                raise ConnectionError("the sender has called it off")
            if time.monotonic() > deadline:
                raise ConnectionError("nothing was heard of the sender")
            time.sleep(POLL_S)

    def got(self, name: str, num_buckets: int) -> None:
        with exchanging():
            self._store.set(f"got/{name}", str(num_buckets))

    def done(self, name: str) -> None:
        with exchanging():
            self._store.set(f"done/{name}", "")

    # The sender's.

    def gather(self, given_up: threading.Event) -> None:
        """Wait until all have come, and have them begin."""
        self._wait_for("got", "not all came", given_up)
        with exchanging():
            self._store.set("go", "")

    def wait_for_all(self, given_up: threading.Event) -> None:
        """Until all have everything: what was sent may still lie in the buffers of sockets."""
        self._wait_for("done", "not all of it was received", given_up)

    def call_off(self) -> None:
        """Release every process that waits for the others."""
        with suppress(RuntimeError):  # the store is gone, and everybody sees it
            self._store.set("off", "")

    @property
    def slowest(self) -> str:
        """The receivers that got least."""
        try:
            with exchanging():
                got = {name: int(self._store.get(f"got/{name}")) if self._is_set(f"got/{name}") else -1 for name in self._ticket.receivers}
        except ConnectionError as error:
            return f"all engines ({error})"
        return ", ".join(name for name in got if got[name] == min(got.values()))

    def _wait_for(self, what: str, late: str, given_up: threading.Event) -> None:
        deadline = time.monotonic() + self._ticket.timeout_s
        while not self._is_set(*(f"{what}/{name}" for name in self._ticket.receivers)):
            if time.monotonic() > deadline:
                raise ConnectionError(f"{late} within {self._ticket.timeout_s:g} s (sync.timeout_s)")
            if given_up.wait(POLL_S):
                raise ConnectionError("an engine ended, or cannot take the weights over")

    def _is_set(self, *keys: str) -> bool:
        with exchanging():
            return self._store.check(list(keys))


@contextmanager
def exchanging() -> Iterator[None]:
    """Turn torch's errors in here, which all come from the exchange with others, into a connection
    error.

    Raises:
        ConnectionError: with torch's words.
    """
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error).strip().partition("\n")[0][:300]) from error
