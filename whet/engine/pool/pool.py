"""Several engines as one engine. See docs/engines.md.

A request goes to the member with the fewest, a conversation stays with its first member, and the
requests of a lost member continue elsewhere from their sampled tokens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from typing import Generic

from torch import Tensor

from whet.engine.base import Capabilities, EngineFailed, EngineLost, PrefixUse, nats_apart
from whet.engine.pool.breaker import Breaker
from whet.engine.pool.config import PoolConfig, Supervision
from whet.engine.pool.member import Incident, M, OnIncident, Slot, StartMember, State
from whet.engine.pool.placement import in_flight
from whet.engine.pool.reply import PooledReply
from whet.engine.pool.requests import Requests
from whet.engine.pool.supervisor import Supervisor
from whet.engine.pool.weights import WeightSync
from whet.observe.metrics import Last, Mean, Metrics, Total
from whet.transport.base import Ticket
from whet.types import Chunk, Proof, Receipt, Request, Scored
from whet.types.columns import Ints

CLOSED = "the engine was closed"


def print_incident(incident: Incident) -> None:
    """Say it on standard error."""
    print(f"warning: {incident.cause}; {incident.then}", file=sys.stderr, flush=True)


class EnginePool(Generic[M]):
    """An `Engine` of several members, which may leave and be replaced.

    Args:
        slots: the places, each with its member; all have the same capabilities.
        weights: brings new weights to members.
        config: deadlines, restarts, breakers.
        deterministic: conversations go to members by the order in which they are opened, and a lost
            member ends everything.
        on_incident: called for each member that is lost.
        tolerance: largest difference in nats between members' scores of the same tokens.
        quantization_nats: as in `Capabilities`.
    """

    def __init__(
        self,
        slots: Sequence[Slot[M]],
        weights: WeightSync,
        config: PoolConfig,
        *,
        deterministic: bool,
        on_incident: OnIncident = print_incident,
        tolerance: float = 0.0,
        quantization_nats: float = 0.0,
    ) -> None:
        config = self._config = Supervision.of(config)
        self._deterministic, self._weights = deterministic, weights
        replies: dict[str, PooledReply] = {}
        describe = lambda slot: in_flight(slot, replies)  # noqa: E731
        self._supervisor = Supervisor(slots, weights, config, deterministic=deterministic, on_incident=on_incident, in_flight=describe)
        self._supervisor.published.tolerance = tolerance
        self._requests = Requests(self._supervisor, replies, config, deterministic=deterministic)
        self._reported_retried = self._reported_restarts = 0
        self._reported_prefixes: dict[str, PrefixUse] = {}
        (first, *_) = self.members
        self._capabilities = replace(first.capabilities, shares_weights=False, quantization_nats=quantization_nats)

    @property
    def members(self) -> list[M]:
        """The present members."""
        return [slot.member for slot in self._supervisor.slots if slot.member is not None]

    @property
    def slots(self) -> list[Slot[M]]:
        return self._supervisor.slots

    @property
    def version(self) -> int:
        return self._supervisor.published.version

    @property
    def later_proof(self) -> Proof | None:
        """Level of proof of the members that took the present version over later than others, by comparison with those; None: there are
        none."""
        return self._supervisor.published.later

    @property
    def paused(self) -> bool:
        return self._supervisor.published.paused

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def metrics(self) -> Metrics:
        """`engine/...`: how many members serve; restarts, retried requests and use of prefix caches since it was last asked."""
        restarts, retried = self._supervisor.num_restarts - self._reported_restarts, self._requests.num_retried - self._reported_retried
        self._reported_restarts, self._reported_retried = self._supervisor.num_restarts, self._requests.num_retried
        new = PrefixUse()
        for slot in self.slots:
            new += slot.prefix.since(self._reported_prefixes.get(slot.name, PrefixUse()))
        self._reported_prefixes = {slot.name: slot.prefix for slot in self.slots}
        return {
            "engine/members_up": Last(float(len(self._supervisor.up))),
            "engine/restarts": Total(float(restarts)),
            "engine/retried_requests": Total(float(retried)),
        } | ({"engine/prefix_hit_rate": Mean(float(new.cached), float(new.asked))} if new.asked else {})

    def open(self, conversation: str) -> None:
        self._supervisor.check_open()
        self._requests.open(conversation)

    def release(self, conversation: str) -> None:
        self._requests.release(conversation)

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        return self._requests.generate(request)

    async def abort(self, request_id: str) -> None:
        await self._requests.abort(request_id)

    async def pause(self) -> None:
        async with self._supervisor.enter():
            self._supervisor.published.paused = True
            await self._supervisor.everywhere("to pause", lambda member: member.pause(), self._config.step_timeout_s, behind=True)

    async def resume(self) -> None:
        async with self._supervisor.enter():
            self._supervisor.published.check_whole()
            self._supervisor.published.paused = False
            await self._supervisor.everywhere("to resume", lambda member: member.resume(), self._config.step_timeout_s, behind=True)

    async def flush(self) -> None:
        async with self._supervisor.enter():
            await self._supervisor.everywhere("to forget its cache", lambda member: member.flush(), self._config.step_timeout_s)

    async def sleep(self) -> None:
        async with self._supervisor.enter():
            self._supervisor.published.asleep = True
            await self._supervisor.everywhere("to sleep", lambda member: member.sleep(), self._config.step_timeout_s, behind=True)

    async def score(self, tokens: Ints, temperature: float = 1.0, top_logprobs: int = 0) -> Scored:
        """The score from the first member, compared with those of all others, which come along. Raises EngineFailed if
        they disagree."""
        asked = tokens, temperature, top_logprobs
        while True:
            async with self._supervisor.enter():
                self._supervisor.published.check_whole()
                timeout_s = self._config.step_timeout_s
                answers = await self._supervisor.everywhere("to score tokens", lambda member: member.score(*asked), timeout_s)
                if answers:
                    (first, expected), *others = answers
                    for slot, found in others:
                        if not (worst := nats_apart(found, expected)) <= self._supervisor.published.tolerance:
                            raise EngineFailed(f"{slot.name} scores the same tokens {worst:.3g} nats away from {first.name}")
                    self._supervisor.published.score = asked, expected
                    return replace(expected, members=tuple(each for _, found in answers for each in found.members or (found,)))
            await self._anyone()

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        """All members stand still while they take new weights over. One that is lost meanwhile comes back with them, proven, or not at all.

        Raises:
            ValueError: as `Engine.update`.
            EngineFailed: if the weights arrived in part only: nothing is sampled then.
        """
        now = self._supervisor.published
        async with self._supervisor.enter():
            if now.updated and version <= now.version:
                raise ValueError(f"the engine holds version {now.version} already, and was asked to take over version {version}")
            await self._supervisor.gone()  # what is lost and lives on reads the memory that changes
            await self._supervisor.everywhere("to pause", lambda member: member.pause(), self._config.step_timeout_s, behind=True)
            slots = {slot.name: slot for slot in self._supervisor.there}
            receivers = {name: slot.member.receivers for name, slot in slots.items() if slot.member is not None}
            timeout_s = None if self._weights.simultaneous else self._config.update_timeout_s

            async def update_member(name: str, ticket: Ticket) -> Receipt:
                call = self._supervisor.ask(slots[name], "to take over weights", lambda member: member.update(ticket, version), timeout_s)
                for receipt in await call:
                    return receipt
                raise EngineLost(slots[name].cause)

            try:
                now.receipt = await self._weights.send(weights, version, receivers, update_member)
                now.version, now.updated, now.asleep, now.score, now.torn, now.later = version, True, False, None, None, None
                self._supervisor.caught_up()
            except ValueError:  # nothing was changed
                raise
            except BaseException as error:
                now.torn = f"the engines may hold half of version {version}, and sample nothing: {type(error).__name__}: {error}"
                if isinstance(error, Exception):
                    await self._supervisor.report(now.torn)
                raise
            finally:
                if now.torn is None and not now.paused:
                    await self._supervisor.everywhere("to resume", lambda member: member.resume(), self._config.step_timeout_s, behind=True)
        while now.receipt is None:  # all were lost: a member that comes back takes the weights over
            await self._anyone()
        return now.receipt

    async def busy_s(self) -> float:
        self._supervisor.enter()
        for slot, health in await self._supervisor.everywhere("how busy it is", lambda m: m.health(), self._config.health_timeout_s):
            slot.busy_s, slot.prefix = health.busy_s, health.prefix
        return self._supervisor.busy_s

    async def close(self) -> None:
        await self._supervisor.close()
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Close without an event loop. A second time it does nothing."""
        self._weights.close()
        self._supervisor.end(CLOSED)

    # Members come and go.

    async def join(self, name: str, start: StartMember[M]) -> None:
        """Have another member start, and serve as soon as it is proven to hold the present weights.

        Raises:
            EngineFailed: if it does not start.
            ValueError: in deterministic mode, or if a member has that name.
        """
        self._refuse_change()
        if any(slot.name == name for slot in self.slots):
            raise ValueError(f"the pool has a member {name!r} already")
        slot = Slot(name, start, None, breaker_of(self._config), State.DOWN)
        self.slots.append(slot)
        self._supervisor.enter()
        while slot.state is State.DOWN:
            await self._supervisor.change()
        if slot.state is State.GIVEN_UP:
            self.slots.remove(slot)
            raise EngineFailed(slot.cause)

    async def drain(self, name: str, timeout_s: float) -> None:
        """Have a member leave: it gets nothing new, ends what it has, and its conversations go on elsewhere. What it has not ended by the
        deadline goes on elsewhere, too.

        Raises:
            ValueError: in deterministic mode, or if there is no other member.
        """
        self._refuse_change()
        slot = next((slot for slot in self.slots if slot.name == name), None)
        if slot is None or not any(other.state in (State.SERVING, State.DOWN) for other in self.slots if other is not slot):
            raise ValueError(f"{name!r} cannot leave the pool: " + ("there is no such member" if slot is None else "no other is there"))
        slot.state = State.DRAINING if slot.member is not None else State.GIVEN_UP
        deadline = asyncio.get_running_loop().time() + timeout_s
        while slot.requests and slot.up and asyncio.get_running_loop().time() < deadline:
            await self._supervisor.change()
        async with self._supervisor.enter():
            member, slot.member, slot.state = slot.member, None, State.GIVEN_UP
            self.slots.remove(slot)
        if member is not None:
            await asyncio.to_thread(member.stop)

    async def _anyone(self) -> None:
        """Wait until a member is up."""
        if self._supervisor.hopeless:
            raise self._supervisor.nobody_left()
        await self._supervisor.change()

    def _refuse_change(self) -> None:
        if self._deterministic:
            raise ValueError("with deterministic=true the engine's members stay as they are: with others the bits would be others")


def breaker_of(config: PoolConfig) -> Breaker:
    found = Supervision.of(config)
    return Breaker(found.breaker_failures, found.breaker_open_s)
