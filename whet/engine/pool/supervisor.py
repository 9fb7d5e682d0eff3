"""Supervision of a pool's members: each is checked regularly; a lost one is replaced, and the new one
is proven before it serves.

Every call of a member has a deadline by the monotonic clock; a member that misses one is killed, so
that it cannot come back by itself.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from types import MappingProxyType
from typing import Generic, TypeVar

from whet.engine.base import EngineFailed, EngineLost, PrefixUse
from whet.engine.pool.config import Supervision
from whet.engine.pool.member import STEADY_S, CannotCatchUp, Incident, M, OnIncident, Slot, State
from whet.engine.pool.proof import Published, in_time, prove
from whet.engine.pool.weights import WeightSync

T = TypeVar("T")
_STATE = attrgetter("state")
NUDGE_S = 0.5
"""Longest interval in seconds between two checks of a task that waits for a member: an open breaker
becomes half-open without a notice."""


class Supervisor(Generic[M]):
    """Supervisor of a pool's members; see the module.

    Args:
        slots: the pool's places, each with its member.
        weights: brings published weights to a member.
        config: deadlines and restarts.
        deterministic: end everything when a member is lost.
        on_incident: called for each member that is lost.
        in_flight: describes the requests of a place, a line each.
    """

    def __init__(
        self,
        slots: Sequence[Slot[M]],
        weights: WeightSync,
        config: Supervision,
        *,
        deterministic: bool,
        on_incident: OnIncident,
        in_flight: Callable[[Slot[M]], tuple[str, ...]],
    ) -> None:
        self.slots = list(slots)
        self.published = Published()
        self.num_restarts = 0
        self.over: str | None = None
        """Why nothing is served any more."""
        self._weights, self._config, self._deterministic = weights, config, deterministic
        self.on_incident, self._in_flight = on_incident, in_flight
        self._given_up = threading.Event()
        self._broken = False
        """True once a lost member has ended everything."""
        self._busy_before_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changing = asyncio.Lock()
        self._checking: asyncio.Task[None] | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._going: dict[str, asyncio.Task[None]] = {}
        """Members that are lost and not killed yet, by their places' names."""

    @property
    def up(self) -> list[Slot[M]]:
        return [slot for slot in self.slots if slot.up]

    @property
    def there(self) -> list[Slot[M]]:
        """Places that are up, and those that wait for the next version."""
        return [slot for slot in self.slots if slot.up or slot.state is State.BEHIND]

    @property
    def busy_s(self) -> float:
        """Busy time of all members so far, lost ones included, as they last reported it."""
        return self._busy_before_s + sum(slot.busy_s for slot in self.slots)

    def enter(self) -> asyncio.Lock:
        """See that members are looked after on the present event loop.

        Returns:
            Held while all members change: while they take over weights, and while one joins.

        Raises:
            EngineFailed: if nothing is served any more.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._changing, self._checking = loop, asyncio.Lock(), None
            self._waiters.clear()
        if self._checking is None or self._checking.done():
            self._checking = loop.create_task(self._check_health(), name="pool")
        for slot in self.slots if State.DOWN in map(_STATE, self.slots) else ():
            if slot.state is State.DOWN and slot.name not in self._going and (slot.starting is None or slot.starting.done()):
                slot.starting = loop.create_task(self._restart(slot), name=f"restart {slot.name}")
        return self._changing

    def check_open(self) -> None:
        """Refuse a call after the pool has ended.

        Raises:
            EngineLost: if a lost member ended everything.
            EngineFailed: if the pool was closed.
        """
        if self.over is not None:
            raise EngineLost(self.over) if self._broken else EngineFailed(self.over)

    async def change(self, timeout_s: float = NUDGE_S) -> None:
        """Wait until a member comes, goes or is free, for so long at most.

        Raises:
            EngineFailed: if nothing is served any more.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)
        self.enter()

    def changed(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def caught_up(self) -> None:
        """Mark the places that waited for a version as serving: they have it."""
        for slot in self.slots:
            if slot.state is State.BEHIND:
                slot.state = State.SERVING
        self.changed()

    def nobody_left(self) -> EngineFailed:
        """Error for the case that no member serves and none will come back."""
        causes = "; ".join(f"{slot.name}: {slot.cause}" for slot in self.slots if slot.cause) or "all have left"
        if any(slot.state is State.BEHIND for slot in self.slots):
            return EngineFailed(f"no engine is left that holds version {self.published.version}: {causes}")
        return EngineFailed(f"no engine is left, and none is started any more (engine.pool.restarts = {self._config.restarts}): {causes}")

    @property
    def hopeless(self) -> bool:
        return all(slot.state in (State.GIVEN_UP, State.BEHIND) for slot in self.slots)

    async def ask(self, slot: Slot[M], what: str, call: Callable[[M], Awaitable[T]], timeout_s: float | None) -> list[T]:
        """A member's answer, in a list; an empty list: the member is lost. Its other errors are raised
        here. With `timeout_s` None the wait has no limit."""
        member = slot.member
        if member is None:
            return []
        try:
            answer = await in_time(call(member), f"{slot.name}: {what}", timeout_s)
        except EngineLost as lost:
            await self.lose(slot, member, str(lost))
            return []
        return [answer] if slot.member is member else []

    async def everywhere(
        self, what: str, call: Callable[[M], Awaitable[T]], timeout_s: float, *, behind: bool = False
    ) -> list[tuple[Slot[M], T]]:
        """Answers of all members that are up, and with `behind` of those that wait for a version; lost
        ones are left out."""
        asked = self.there if behind else self.up
        answers = await asyncio.gather(*(self.ask(slot, what, call, timeout_s) for slot in asked), return_exceptions=True)
        found: list[tuple[Slot[M], T]] = []
        for slot, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            found += [(slot, each) for each in answer]
        return found

    async def lose(self, slot: Slot[M], member: M, cause: str) -> None:
        """A member is gone, or does not answer: it is killed, and another comes if one may. One that is lost already is left alone."""
        if slot.member is not member or self.over is not None:
            return
        in_flight, leaves = self._in_flight(slot), slot.state is State.DRAINING
        if time.monotonic() - slot.since > STEADY_S:
            slot.num_restarts = 0
        slot.member, slot.cause, slot.state = None, cause, State.DOWN
        self._busy_before_s, slot.busy_s, slot.prefix = self._busy_before_s + slot.busy_s, 0.0, PrefixUse()
        if self._deterministic:
            self._broken = True
            self.over = f"{cause}. With deterministic=true another would go on with other bits, so the run ends: the same command goes on"
        elif leaves or slot.num_restarts >= self._config.restarts:
            slot.state = State.GIVEN_UP
        going = asyncio.get_running_loop().create_task(self._end_lost(slot, member, in_flight), name=f"end {slot.name}")
        self._going[slot.name] = going
        await asyncio.shield(going)  # the waiting task may be cancelled, and the member is killed all the same

    async def _end_lost(self, slot: Slot[M], member: M, in_flight: tuple[str, ...]) -> None:
        """Read where a lost member was, kill it, and tell of it. Only then another is started."""
        then, stacks = self._what_next(slot), dict[str, str]()
        try:
            try:
                stacks = await asyncio.to_thread(self._stacks, {slot.name: member})
            except Exception as error:  # no reason to leave it alive
                stacks = {slot.name: f"its stacks could not be read: {type(error).__name__}: {error}"}
            await asyncio.to_thread(member.kill)
        except asyncio.CancelledError:  # with its event loop
            member.kill()
            raise
        except Exception as alive:  # nothing that it says is heard any more
            slot.cause = f"{slot.cause}; {alive}"
        finally:
            del self._going[slot.name]
            self.on_incident(Incident(slot.name, slot.cause, then, in_flight, stacks))
        self.changed()
        if self.over is None:
            self.enter()

    async def gone(self) -> None:
        """Wait until every member that was lost is killed."""
        for going in list(self._going.values()):
            await asyncio.wait({going})

    async def report(self, cause: str) -> None:
        """Tell of what happened to all members together."""
        stacks = await asyncio.to_thread(self._stacks)
        in_flight = tuple(line for slot in self.slots for line in self._in_flight(slot))
        self.on_incident(Incident("engines", cause, "nothing is sampled until a version arrives whole", in_flight, stacks))

    async def close(self) -> None:
        """Nothing is looked after any more."""
        self._given_up.set()
        await self.gone()
        mine = [task for task in (self._checking, *(slot.starting for slot in self.slots)) if task is not None and not task.done()]
        loop = asyncio.get_running_loop()
        for task in (task for task in mine if task.get_loop() is loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        self.changed()

    def end(self, reason: str) -> None:
        """End all members, without an event loop; from any thread."""
        self.over = self.over or reason
        self._given_up.set()
        ending = [threading.Thread(target=slot.member.stop) for slot in self.slots if slot.member is not None]
        for each in ending:  # side by side: one that hangs is waited for
            each.start()
        for each in ending:
            each.join()

    async def _check_health(self) -> None:
        """Look at every member again and again."""
        while True:
            await asyncio.sleep(self._config.health_every_s)
            await asyncio.gather(*(self._check_member(slot) for slot in self.there))

    async def _check_member(self, slot: Slot[M]) -> None:
        member = slot.member
        timeout_s = self._config.health_timeout_s
        for health in await self.ask(slot, "a look at its health (engine.pool.health_timeout_s)", lambda m: m.health(), timeout_s):
            slot.busy_s, slot.prefix = health.busy_s, health.prefix
            if member is not None and health.step_s > self._config.step_timeout_s:
                cause = f"{slot.name} has been in one step for {health.step_s:.0f} s (engine.pool.step_timeout_s)"
                await self.lose(slot, member, cause)

    async def _restart(self, slot: Slot[M]) -> None:
        """Start members until one serves, as often as may be."""
        while slot.state is State.DOWN:
            if slot.cause:  # else it is new
                await asyncio.sleep(self._config.restart_backoff_s * 2**slot.num_restarts)
                slot.num_restarts += 1
                self.num_restarts += 1
            try:
                await self._admit(slot, await asyncio.to_thread(slot.start, self._given_up))
            except Exception as failed:  # whatever a start or a proof can raise, the others serve on
                slot.cause = str(failed) if isinstance(failed, EngineFailed) else f"{slot.name}: {type(failed).__name__}: {failed}"
                if slot.num_restarts >= self._config.restarts:
                    slot.state = State.GIVEN_UP
                self.on_incident(Incident(slot.name, slot.cause, self._what_next(slot), (), {}))
            self.changed()

    async def _admit(self, slot: Slot[M], member: M) -> None:
        """Let a member serve that holds what is published, by its receipt and by the probe.

        Raises:
            EngineFailed: if it does not; it is then ended.
        """
        try:
            async with self.enter():
                try:
                    await prove(slot.name, member, self.published, self._weights, self._config)
                    state = State.SERVING
                except CannotCatchUp as why:
                    slot.cause, state = str(why), State.BEHIND
                    self.on_incident(Incident(slot.name, slot.cause, f"{slot.name} samples nothing until then", (), {}))
                slot.member, slot.state, slot.since = member, state, time.monotonic()
        except Exception:
            await asyncio.to_thread(member.kill)
            raise
        except BaseException:  # a cancellation: nothing is waited for any more
            member.kill()
            raise

    def _stacks(self, lost: Mapping[str, M] = MappingProxyType({})) -> dict[str, str]:
        """Stacks of all members, not only the lost ones: one that hangs may wait for another."""
        others = {slot.name: slot.member for slot in self.there if slot.member is not None}
        return {
            name: text for members in (lost, others) for name, member in members.items() if (text := member.stacks(lost=members is lost))
        }

    def _what_next(self, slot: Slot[M]) -> str:
        if self.over is not None:
            return "the run ends"
        if slot.state is State.GIVEN_UP:
            left = len(self.up)
            return "it is not started again" + (f", {left} of {len(self.slots)} go on" if left else ", and no other is left")
        return f"it is started again ({slot.num_restarts + 1} of {self._config.restarts}); its requests go on elsewhere"
