"""New weights for the members of a pool, by whatever transport: one ticket for all, and a receipt from each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from whet.engine.base import EngineLost
from whet.engine.pool.member import CannotCatchUp, Member
from whet.transport.apply import whole_set
from whet.transport.base import Sender, SentOnce, Stream, Ticket, TransportError
from whet.transport.deliver import deliver
from whet.transport.quantize import QuantizingStream
from whet.types import Receipt

QuantizeStream = Callable[[Iterable[tuple[str, Tensor]]], QuantizingStream]
UpdateMember = Callable[[str, Ticket], Awaitable[Receipt]]
"""Has the member of a name take a ticket over. Raises EngineLost if it is lost meanwhile; another comes in its place."""


class WeightSync:
    """The way of new weights to a pool's members.

    Args:
        sender: the trainer's end of the transport. The pool closes it.
        shapes: the members' weights by name, looked at for their shapes.
        quantize: makes the stream that is sent of the trainer's; None: it is sent as it is.
    """

    def __init__(self, sender: Sender, shapes: Mapping[str, Tensor], quantize: QuantizeStream | None = None) -> None:
        self._sender, self._shapes, self._quantize = sender, shapes, quantize

    @property
    def simultaneous(self) -> bool:
        """True if all members take part in one exchange, so that each may hold up the others: only the
        sender watches the time then, and a member that is lost meanwhile stops the version."""
        return self._sender.simultaneous

    async def send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, receivers: Mapping[str, Sequence[str]], update: UpdateMember
    ) -> Receipt | None:
        """Send weights to all members, which are paused. A member that is lost meanwhile is left out,
        unless all take part in one exchange.

        Args:
            weights: named as in Hugging Face files.
            version: version of the weights.
            receivers: the processes of each member that open the ticket, by the member's name.
            update: has a member take the ticket over.

        Returns:
            The members' receipts as one; None: all were lost.

        Raises:
            ValueError: if the weights are not those of the members' model, and nothing was changed.
            TransportError: if they arrived in part.
        """
        if not isinstance(weights, Stream):
            weights = whole_set(self._shapes, weights)
        quantizing = None if self._quantize is None else self._quantize(weights)

        async def load(name: str, ticket: Ticket) -> Receipt | None:
            try:
                return replace(await update(name, ticket), engine=name)
            except EngineLost:
                if self.simultaneous:
                    raise
                return None

        loads = {name: partial(load, name) for name in receivers}
        try:
            stream = weights if quantizing is None else quantizing
            delivery = await deliver(self._sender, stream, version, loads, [name for names in receivers.values() for name in names])
        except ValueError as refused:
            raise TransportError(f"version {version}: the engine refused the weights: {refused}") from refused
        answers = delivery.receipts
        if not answers:
            return None
        return replace(
            answers[0],
            engine="the engine",
            members=tuple(answers),
            num_stale_tokens=sum(answer.num_stale_tokens for answer in answers),
            sent=None if quantizing is None else quantizing.digests,
            wire_bytes=delivery.sent.size_bytes,
            encode_s=delivery.sent.encode_s + (0.0 if quantizing is None else quantizing.quantize_s),
            wire_s=delivery.sent.wire_s,
            load_s=max(answer.load_s for answer in answers),
        )

    async def catch_up(self, member: Member, version: int) -> Receipt:
        """Have a later member take over what was sent last.

        Raises:
            CannotCatchUp: if the transport cannot send it again.
        """
        try:
            ticket = await asyncio.to_thread(self._sender.whole, version)
        except SentOnce as gone:
            raise CannotCatchUp(f"{gone} (sync.transport)") from gone
        return await member.update(ticket, version)

    def close(self) -> None:
        self._sender.close()
