"""One version from a sender to all engines: who waits for whom, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from whet.transport.base import OtherBase, Sender, Sent, Ticket, TransportError
from whet.types import Receipt

T = TypeVar("T")
Load = Callable[[Ticket], Awaitable[Receipt | None]]
"""Has an engine open a ticket and take the weights over; None: it was lost, and the others go on without it."""
LAST_WORDS_S = 30.0
"""For engines to say how it went with them when a version has failed: so that none is left in the middle of it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A version that every engine answered for."""

    sent: Sent
    receipts: list[Receipt]
    """In the order of the engines, without those that were lost."""


async def deliver(
    sender: Sender, weights: Iterable[tuple[str, Tensor]], version: int, loads: Mapping[str, Load], receivers: list[str] | None = None
) -> Delivery:
    """Send a version to paused engines, and wait for the receipts of all.

    There is one deadline, the sender's. While all take part in one exchange only the sender applies it,
    for no other process knows who delays whom; the engines' deadline begins after the sending.

    Args:
        sender: the transport.
        weights: the weights to send, read in a thread.
        version: version of the weights.
        loads: one for each engine, by its name.
        receivers: a name for every process that opens tickets, if an engine has several; None: each
            engine is one process.

    Raises:
        TransportError: with the name of the engine that did not get the weights, or not in time.
        Exception: the first error other than a `TransportError` from an engine or from reading the
            weights, if there was one.
    """
    ticket = sender.begin(version, list(loads) if receivers is None else receivers)
    faults: list[Exception] = []

    async def noted(work: Awaitable[T]) -> T | None:
        try:
            return await work
        except Exception as error:
            faults.append(error)
            sender.give_up()
            return None

    sending = asyncio.create_task(noted(asyncio.to_thread(sender.send, ticket, weights)))
    loading: dict[str, asyncio.Task[Receipt | None]] = {}
    try:
        if not sender.simultaneous:
            await sending
        if not faults:
            loading = {name: asyncio.create_task(noted(_load(sender, ticket, name, load))) for name, load in loads.items()}
        sent = await sending
        _, late = await asyncio.wait(loading.values(), timeout=_left_s(sender, faults)) if loading else ((), ())
        for name in (name for name, task in loading.items() if task in late):
            why = f"did not take over the weights within {sender.timeout_s:g} s (sync.timeout_s)"
            faults.append(TransportError(f"version {version}: {name} {why}"))
            sender.give_up()
    except asyncio.CancelledError:  # the thread that sends goes on, and is waited for as the run ends
        sender.give_up()
        raise
    finally:
        for task in (sending, *loading.values()):
            task.cancel()
    for error in sorted(faults, key=lambda error: isinstance(error, TransportError)):  # what was cut follows from another's end
        raise error
    assert sent is not None
    receipts = [task.result() for task in loading.values()]
    return Delivery(sent, [receipt for receipt in receipts if receipt is not None])


def _left_s(sender: Sender, faults: list[Exception]) -> float:
    return min(LAST_WORDS_S, sender.timeout_s) if sender.simultaneous and faults else sender.timeout_s


async def _load(sender: Sender, ticket: Ticket, name: str, load: Load) -> Receipt | None:
    try:
        try:
            return await load(ticket)
        except OtherBase:
            return await load(await asyncio.to_thread(sender.whole, ticket.version))
    except TransportError as error:
        raise TransportError(f"version {ticket.version}: {name}: {error}") from error
