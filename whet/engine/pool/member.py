"""Member of a pool, its place there, and the reports of its loss."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from whet.engine.base import Capabilities, EngineHealth, PrefixUse
from whet.engine.pool.breaker import Breaker
from whet.transport.base import Ticket
from whet.types import Chunk, Receipt, Request, Scored
from whet.types.columns import Ints

STEADY_S = 600.0
"""A member that served for so long has its restarts forgotten."""


class EngineCalls(Protocol):
    """Calls of a member that its engine answers, wherever that is."""

    def open(self, conversation: str) -> None:
        """As `Engine.open`. Does not wait for the member, and may be called again for an open
        conversation."""
        ...

    def release(self, conversation: str) -> None:
        """As `Engine.release`. Does not wait for the member; unknown conversations are ignored."""
        ...

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """As `Engine.generate`. Closing the generator early ends the request at the member, without an error
        if that is gone.

        Raises:
            EngineRefused: if the request can never run.
            StaleCache: if older weights' cache was about to be read.
            ValueError: if a request of that id is running.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """As `Engine.abort`. Idempotent; unknown ids are ignored."""
        ...

    async def score(self, tokens: Ints, temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        """As `Engine.score`. Also while paused."""
        ...

    async def pause(self) -> None:
        """As `Engine.pause`: when it returns no token is being sampled, and requests that run wait with what
        they have. Idempotent."""
        ...

    async def resume(self) -> None:
        """Have requests go on. Idempotent."""
        ...

    async def flush(self) -> None:
        """As `Engine.flush`. Idempotent."""
        ...

    async def sleep(self) -> None:
        """As `Engine.sleep`: `update` wakes it. Idempotent."""
        ...

    async def health(self) -> EngineHealth:
        """Health, without computing anything and without waiting for a step: called every few seconds, also
        while weights arrive."""
        ...


class WeightCalls(Protocol):
    """Calls of a member that bring its engine new weights."""

    async def update(self, ticket: Ticket, version: int) -> Receipt:
        """Take over the weights of a ticket while paused, drop every older cache, and return what is then held.

        Not idempotent. After any other error than the first two the member's weights are unknown, and nothing is
        sampled from them.

        Raises:
            OtherBase: if the ticket has changes against another version than it holds; nothing was changed.
            ValueError: if the weights are not those of its model, or the version is not newer; nothing was changed.
            TransportError: if they do not arrive, or are damaged.
        """
        ...


class Member(EngineCalls, WeightCalls, Protocol):
    """A supervised engine: an embedded engine in a process of its own, or the client of a server.

    The pool calls every method on its event loop, except where "any thread" is said. A call may be cancelled at
    each `await`; the member must then be fit for the next call. Calls run side by side: health checks and aborts
    come while requests run and weights arrive. The pool sets the deadlines (`engine.pool`), so a method waits as
    long as it takes.

    Errors of every call but `kill` and `stop`:
        EngineLost: the member or the connection to it is gone. Every later call raises it, too. The pool then calls
            `kill`, starts another member, and samples the rest of the requests elsewhere.
        EngineFailed: this one call failed, and the member lives.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The same for all members of a pool, and constant."""
        ...

    @property
    def receivers(self) -> Sequence[str]:
        """Names of the processes that open a ticket of weights: one, or one for each rank. A restarted
        process has a new name."""
        ...

    def stacks(self, *, lost: bool) -> str:
        """Stacks of its threads, or "" if it cannot report them. Any thread; may take some seconds. With `lost` the
        member is killed next, so the request may crash it; otherwise it must survive."""
        ...

    def kill(self) -> None:
        """Make sure that it samples nothing more and reads no weights, in whatever state it is, and return
        then. Any thread; idempotent.

        A process is killed. A server that somebody else started is cut off: waiting calls raise `EngineLost`,
        and no answer counts any more.

        Raises:
            RuntimeError: if that cannot be had.
        """
        ...

    def stop(self) -> None:
        """Have it end by itself, or else kill it; waiting calls raise. Any thread; idempotent. Raises
        nothing."""
        ...


M = TypeVar("M", bound=Member)
Started = TypeVar("Started", bound=Member, covariant=True)


class StartMember(Protocol[Started]):
    """Starts a member for one place of a pool, again after each loss. Called from any thread; may block."""

    def __call__(self, given_up: threading.Event) -> Started:
        """Start a member and return it when it can serve. It holds the pool's initial weights, or is given
        the published ones next.

        Args:
            given_up: set when nobody waits for the member any more.

        Raises:
            EngineFailed: if it does not start in time, or `given_up` is set. Nothing of it is left then.
        """
        ...


class CannotCatchUp(Exception):
    """A later member cannot get what was published: it has to wait for the next version."""


class State(StrEnum):
    """State of a place in a pool."""

    SERVING = "serving"
    DRAINING = "draining"
    """It is leaving: it finishes its requests and gets no new ones."""
    BEHIND = "behind"
    """It cannot catch up with the published version, and waits for the next one."""
    DOWN = "down"
    """Its member was lost, and another one is starting or will be."""
    GIVEN_UP = "given up"
    """Its member was lost, and no other comes."""


@dataclass(slots=True, eq=False)
class Slot(Generic[M]):
    """A place in a pool, and who serves in it."""

    name: str
    start: StartMember[M]
    member: M | None
    """None: it was lost."""
    breaker: Breaker
    state: State = State.SERVING
    conversations: set[str] = field(default_factory=set)
    """Conversations that stay with this place."""
    requests: set[str] = field(default_factory=set)
    """Ids of those that run here."""
    num_restarts: int = 0
    """Since it was last steady."""
    since: float = field(default_factory=time.monotonic)
    """When its member came."""
    cause: str = ""
    """Why its last member was lost."""
    busy_s: float = 0.0
    """Busy time of its present member, as last reported."""
    prefix: PrefixUse = field(default=PrefixUse())
    """Use of its present member's prefix cache, as last reported."""
    starting: asyncio.Task[None] | None = None
    """Task that starts another member."""

    @property
    def load(self) -> int:
        return len(self.conversations) + len(self.requests)

    @property
    def up(self) -> bool:
        """True if it has a member that holds the published weights."""
        return self.member is not None and self.state in (State.SERVING, State.DRAINING)


@dataclass(frozen=True, slots=True)
class Incident:
    """A member was lost, or did not come back."""

    name: str
    cause: str
    """In one line, or a few."""
    then: str
    """Reaction to the loss."""
    in_flight: tuple[str, ...]
    """The requests that it had, a line each: nothing of what they say."""
    stacks: dict[str, str]
    """Stacks of each of the engine's processes; empty for a process that ended by itself."""


OnIncident = Callable[[Incident], None]
"""Called with each incident, on the pool's event loop."""
