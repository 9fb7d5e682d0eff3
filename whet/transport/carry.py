"""One version from a sender to all engines: who waits for whom, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from whet.transport.base import OtherBase, Sender, Sent, Ticket, TransportError
from whet.types import Receipt

Load = Callable[[Ticket], Awaitable[Receipt | None]]
"""Has an engine open a ticket and take the weights over; None: it was lost, and the others go on without it."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A version that every engine answered for."""

    sent: Sent
    receipts: list[Receipt]
    """In the order of the engines, without those that were lost."""


async def carry(
    sender: Sender, weights: Iterable[tuple[str, Tensor]], version: int, loads: Mapping[str, Load], receivers: list[str] | None = None
) -> Carried:
    """Send a version to engines that stand still, and wait for the receipts of all.

    Args:
        sender: the transport.
        weights: what is sent, read in a thread.
        version: of it.
        loads: of each engine, by its name.
        receivers: a name for every process that opens tickets, where an engine has several; None: the engines are the processes.

    Raises:
        TransportError: naming the engine that did not get the weights, or not in time.
        Exception: what reading the weights or an engine raised.
    """
    ticket = sender.begin(version, list(loads) if receivers is None else receivers)
    if not sender.simultaneous:
        sent = await asyncio.to_thread(sender.send, ticket, weights)
        return Carried(sent, await _load_all(sender, ticket, loads))
    sending = asyncio.create_task(asyncio.to_thread(sender.send, ticket, weights))
    loading = asyncio.create_task(_load_all(sender, ticket, loads))
    sent, receipts = await asyncio.gather(sending, loading, return_exceptions=True)
    raise_most_telling([sent, receipts])
    assert isinstance(sent, Sent) and isinstance(receipts, list)
    return Carried(sent, receipts)


async def _load_all(sender: Sender, ticket: Ticket, loads: Mapping[str, Load]) -> list[Receipt]:
    """Every engine is waited for, so that none is left in the middle when another fails."""
    found = await asyncio.gather(*(_load(sender, ticket, name, load) for name, load in loads.items()), return_exceptions=True)
    raise_most_telling(found)
    return [receipt for receipt in found if isinstance(receipt, Receipt)]


async def _load(sender: Sender, ticket: Ticket, name: str, load: Load) -> Receipt | None:
    version = ticket.version
    try:
        async with asyncio.timeout(sender.timeout_s):
            try:
                return await load(ticket)
            except OtherBase:
                return await load(await asyncio.to_thread(sender.whole, version))
    except TimeoutError:
        sender.give_up()
        raise TransportError(
            f"version {version}: {name} did not take over the weights within {sender.timeout_s:g} s (sync.timeout_s)"
        ) from None
    except TransportError as error:
        sender.give_up()
        raise TransportError(f"version {version}: {name}: {error}") from error
    except BaseException:
        sender.give_up()
        raise


def raise_most_telling(found: Iterable[object]) -> None:
    """Raise what went wrong: an engine that died, or a mistake, before what followed from it, that a stream was cut."""
    errors = [error for error in found if isinstance(error, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, TransportError)):
        raise error
