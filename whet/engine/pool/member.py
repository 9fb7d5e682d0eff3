"""What a pool is made of: engines that can be looked after, the places that they serve in, and how new weights get to them."""

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
    """An engine that can be looked after: its methods are an `Engine`'s. Whatever is asked of one that is gone raises `EngineLost`."""

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
        """Where its threads are, as far as that can be told; it may take some seconds. From any thread. `lost`: it is killed next, so
        that asking may crash it; else it must go on."""
        ...

    def kill(self) -> None:
        """End it at once, whatever it does; returns when it is gone. From any thread."""
        ...

    def end(self) -> None:
        """Have it end by itself, or else kill it; a second time it does nothing. From any thread."""
        ...


M = TypeVar("M", bound=Member)
Started = TypeVar("Started", bound=Member, covariant=True)
Changed = TypeVar("Changed", bound=Member, contravariant=True)


class Start(Protocol[Started]):
    """Makes a member anew; from any thread. Raises EngineFailed if it does not start, also once the event is set."""

    def __call__(self, given_up: threading.Event) -> Started: ...


class Have(Protocol):
    """Has a member, by its name, take weights over. Raises EngineLost if it is lost meanwhile; another comes in its place."""

    def __call__(self, name: str, take: Callable[[Any], Awaitable[Receipt]], *, by_itself: bool = True) -> Awaitable[Receipt]:
        """`by_itself`: whether it is lost when it takes longer than the pool lets it; else it may be held up by others, and whoever asks
        sees to the time."""
        ...


class NotYet(Exception):
    """A member cannot catch up with what was published: it has to wait for the next version."""


class Weights(Protocol[Changed]):
    """How new weights get to members."""

    async def spread(
        self, weights: Iterable[tuple[str, Tensor]], version: int, members: Mapping[str, Changed], have: Have
    ) -> Receipt | None:
        """Bring weights to all members, which stand still.

        Args:
            weights: named as in Hugging Face files.
            version: of them.
            members: all, by name.
            have: has one of them take the weights over. One that is lost meanwhile may be left out.

        Returns:
            What they hold, or what one holds that differs; None: all were lost. Whoever comes back catches up.

        Raises:
            ValueError: if the weights are not those of the members' model, and nothing was changed.
        """
        ...

    async def catch_up(self, member: Changed, version: int) -> Receipt:
        """Have a member that comes later take over what was spread last. Raises NotYet if it cannot."""
        ...


class State(StrEnum):
    """Of a place in a pool."""

    SERVING = "serving"
    DRAINING = "draining"
    """It leaves: it ends what it has and gets nothing new."""
    BEHIND = "behind"
    """It cannot catch up with what was published, and waits for the next version."""
    DOWN = "down"
    """Its member was lost, and another is on its way or will be."""
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
    """That stay here."""
    requests: set[str] = field(default_factory=set)
    """Ids of those that run here."""
    num_restarts: int = 0
    """Since it was last steady."""
    since: float = field(default_factory=time.monotonic)
    """When its member came."""
    cause: str = ""
    """Why its last member was lost."""
    busy_s: float = 0.0
    """Of its present member, as it was last told."""
    coming: asyncio.Task[None] | None = None
    """What brings another member."""

    @property
    def load(self) -> int:
        return len(self.conversations) + len(self.requests)

    @property
    def up(self) -> bool:
        """Whether it has a member that holds what is published."""
        return self.member is not None and self.state in (State.SERVING, State.DRAINING)


@dataclass(frozen=True, slots=True)
class Incident:
    """A member was lost, or did not come back."""

    name: str
    cause: str
    """In one line, or a few."""
    then: str
    """What is done about it."""
    in_flight: tuple[str, ...]
    """The requests that it had, a line each: nothing of what they say."""
    stacks: dict[str, str]
    """Where the threads of each of the engine's processes were; empty where its process ended by itself."""


Tell = Callable[[Incident], None]
