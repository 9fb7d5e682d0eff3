"""Parts of a pool: supervised engines, their places, and the way of new weights to them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from whet.engine.base import Capabilities, Vitals
from whet.engine.pool.breaker import Breaker
from whet.types import Chunk, Receipt, Request, Scored

STEADY_S = 600.0
"""A member that served for so long has its restarts forgotten."""


class Member(Protocol):
    """A supervised engine; its methods are an `Engine`'s. Every call of a lost member raises
    `EngineLost`."""

    @property
    def capabilities(self) -> Capabilities: ...

    def open(self, conversation: str) -> None: ...

    def release(self, conversation: str) -> None: ...

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]: ...

    async def abort(self, request_id: str) -> None: ...

    async def score(self, tokens: tuple[int, ...], temperature: float = 1.0, top_logprobs: int = 0) -> Scored: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def flush(self) -> None: ...

    async def sleep(self) -> None: ...

    async def vitals(self) -> Vitals:
        """Asked again and again: it must compute nothing."""
        ...

    def stacks(self, *, lost: bool) -> str:
        """Stacks of its threads, if it can still report them; this may take some seconds. Safe from any
        thread. With `lost` it is killed next, so the request may crash it; otherwise it must survive."""
        ...

    def kill(self) -> None:
        """Kill it at once, in any state; returns when it is gone. Safe from any thread."""
        ...

    def end(self) -> None:
        """Have it end by itself, or else kill it; a second time it does nothing. From any thread."""
        ...


M = TypeVar("M", bound=Member)
Started = TypeVar("Started", bound=Member, covariant=True)
Changed = TypeVar("Changed", bound=Member, contravariant=True)


class Start(Protocol[Started]):
    """Starts a new member; from any thread. Raises EngineFailed if the member does not start, or the
    event is set."""

    def __call__(self, given_up: threading.Event) -> Started: ...


class Have(Protocol):
    """Has a member, by its name, take weights over. Raises EngineLost if it is lost meanwhile; another comes in its place."""

    def __call__(self, name: str, take: Callable[[Any], Awaitable[Receipt]], *, by_itself: bool = True) -> Awaitable[Receipt]:
        """Have the member take weights over. With `by_itself` a member that exceeds the pool's deadline
        is lost; without it, other members may hold it up, and the caller watches the time."""
        ...


class NotYet(Exception):
    """A member cannot catch up with what was published: it has to wait for the next version."""


class Weights(Protocol[Changed]):
    """Brings new weights to members."""

    async def spread(
        self, weights: Iterable[tuple[str, Tensor]], version: int, members: Mapping[str, Changed], have: Have
    ) -> Receipt | None:
        """Bring weights to all members, which are paused.

        Args:
            weights: named as in Hugging Face files.
            version: version of the weights.
            members: all members, by name.
            have: has one of them take the weights over. One that is lost meanwhile may be left out.

        Returns:
            The receipt that all agree on, or one that differs; None: all were lost. A member that comes
                back catches up.

        Raises:
            ValueError: if the weights are not those of the members' model, and nothing was changed.
        """
        ...

    async def catch_up(self, member: Changed, version: int) -> Receipt:
        """Have a member that comes later take over what was spread last. Raises NotYet if it cannot."""
        ...


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
    start: Start[M]
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
    coming: asyncio.Task[None] | None = None
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


Tell = Callable[[Incident], None]
