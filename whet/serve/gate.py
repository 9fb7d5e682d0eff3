"""Admission: limits on the samples in the engine and on those that wait, in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from whet.serve.errors import ApiError


@dataclass(slots=True, eq=False)
class Admission:
    """A request's place."""

    num_samples: int
    granted: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """True once it may run; False: it gave up."""


class Gate:
    """Lets requests in while there is room. Nobody overtakes one that has to wait.

    Args:
        max_running: samples in the engine.
        max_waiting: samples that wait.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running, self._max_waiting = max_running, max_waiting
        self._queue: deque[Admission] = deque()
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        return sum(ticket.num_samples for ticket in self._queue)

    async def enter(self, ticket: Admission) -> bool:
        """Wait for its turn; False: it gave up. One that entered has to `leave`.

        Raises:
            ApiError: 429 if too many wait already, 400 if it could never run.
        """
        wanted = ticket.num_samples
        if wanted > self._max_running:
            raise ApiError(400, f"{wanted} samples in one request are over the limit of {self._max_running} (limits.max_running)")
        if (self._queue or self.num_running + wanted > self._max_running) and self.num_waiting + wanted > self._max_waiting:
            full = f"{self.num_running} samples are running and {self.num_waiting} waiting (limits.max_waiting {self._max_waiting})"
            raise ApiError(429, f"the server is full: {full}; try again later", code="server_full", retry_after_s=1)
        self._queue.append(ticket)
        self._admit()
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            if ticket.granted.done() and not ticket.granted.cancelled() and ticket.granted.result():
                self.leave(ticket)  # its turn came in the same moment
            self.give_up(ticket)
            raise

    def leave(self, ticket: Admission) -> None:
        """Make room for the next."""
        self.num_running -= ticket.num_samples
        self._admit()

    def give_up(self, ticket: Admission) -> None:
        """Take a waiting ticket out; one that runs or has left is not touched."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            if not ticket.granted.done():
                ticket.granted.set_result(False)
            self._admit()

    def _admit(self) -> None:
        while self._queue and self.num_running + self._queue[0].num_samples <= self._max_running:
            ticket = self._queue.popleft()
            self.num_running += ticket.num_samples
            ticket.granted.set_result(True)
