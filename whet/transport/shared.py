"""The transport over memory of one machine: weights are put into a file that every engine has mapped."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from whet.transport.apply import copy_weights
from whet.transport.base import Sent, SharedTicket, Ticket, waited_s


class SharedSender:
    """Copies weights into memory that the engines have mapped. They stand still meanwhile.

    Args:
        own: the tensors in that memory (`model.shared`).
        timeout_s: seconds that an engine may take.
    """

    simultaneous = False

    def __init__(self, own: Mapping[str, Tensor], timeout_s: float) -> None:
        self._own = own
        self.timeout_s = timeout_s

    def begin(self, version: int, receivers: Sequence[str]) -> Ticket:
        return SharedTicket(version)

    def send(self, ticket: Ticket, weights: Iterable[tuple[str, Tensor]]) -> Sent:
        began = time.perf_counter()
        arrived = copy_weights(self._own, weights, digest=False)
        return Sent(arrived.size_bytes, wire_s=time.perf_counter() - began - waited_s(weights))

    def whole(self, version: int) -> Ticket:
        return SharedTicket(version)

    def give_up(self) -> None:
        pass

    def close(self) -> None:
        pass
