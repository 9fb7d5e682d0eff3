"""The published weights that members must hold to serve, and the proof that a later member holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from whet.engine.base import EngineFailed, EngineLost, nats_apart
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import CannotCatchUp, Member
from whet.engine.pool.weights import WeightSync
from whet.model.digest import differences
from whet.types import Proof, Receipt, Scored
from whet.types.columns import Ints

T = TypeVar("T")
LATE_S = 0.1
"""An event loop that looks so much too late had no time: nor had the threads that bring answers."""
AGAIN_S = 0.5
"""For answers that were there in time to come through."""


@dataclass(slots=True)
class Published:
    """The published state that members must hold."""

    tolerance: float = 0.0
    """Nats that their scores of the same tokens may be apart: machines round otherwise."""
    version: int = 0
    updated: bool = False
    """True once weights were published; until then members hold their initial weights."""
    receipt: Receipt | None = None
    """Receipt of the members that took this version over."""
    score: tuple[tuple[Ints, float, int], Scored] | None = None
    """Arguments and result of the last score under this version: the publisher's probe."""
    paused: bool = False
    asleep: bool = False
    later: Proof | None = None
    """Level of proof of the members that took this version over later, by comparison with the others; None: there are none."""
    torn: str | None = None
    """Why members may hold half of a later version, if they may: nothing is sampled then."""

    def check_whole(self) -> None:
        """Refuse to sample while members may hold half of a later version.

        Raises:
            EngineFailed: if they may.
        """
        if self.torn is not None:
            raise EngineFailed(self.torn)


async def prove(name: str, member: Member, now: Published, weights: WeightSync, config: PoolConfig) -> None:
    """Have a later member take over the published weights, and compare its receipt and its score of the
    probe with the others'.

    Raises:
        EngineFailed: if it holds anything else.
        CannotCatchUp: if it has to wait for the next version.
    """
    arrival, share, apart_nats = True, 1.0, 0.0
    if now.paused:
        await in_time(member.pause(), f"{name}: to pause", config.step_timeout_s)
    if now.torn is not None:  # what it would be compared with is no longer there
        raise CannotCatchUp(now.torn)
    if now.updated:
        receipt = await in_time(weights.catch_up(member, now.version), f"{name}: to take over weights", config.update_timeout_s)
        if now.receipt is None:
            now.receipt = receipt
        else:
            if wrong := _differences(now.receipt, receipt):
                raise EngineFailed(f"{name} holds other weights than were published as version {now.version}: {', '.join(wrong[:5])}")
            arrival = _both(now.receipt.wire, receipt.wire)
            share = float(_both(now.receipt.resident, receipt.resident) or _both(now.receipt.layout, receipt.layout))
    if now.score is not None:
        arguments, expected = now.score
        found = await in_time(member.score(*arguments), f"{name}: to score the probe", config.step_timeout_s)
        if not (apart_nats := nats_apart(found, expected)) <= now.tolerance:
            raise EngineFailed(f"{name} scores the probe of version {now.version} {apart_nats:.3g} nats away from the others")
    if now.asleep:
        await in_time(member.sleep(), f"{name}: to sleep", config.step_timeout_s)
    if now.updated:
        proof = Proof(arrival, share, apart_nats)
        now.later = proof if now.later is None else now.later.or_weaker(proof)


def _differences(one: Receipt, other: Receipt) -> list[str]:
    """Differences between what two members hold and between what arrived there, as far as both can tell."""
    pairs = [(one.resident, other.resident), (one.layout, other.layout), (one.wire, other.wire)]
    if one.checksums is not None and other.checksums is not None and one.checksums.keys() == other.checksums.keys():
        pairs.append((one.checksums, other.checksums))
    found = [differences(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    return next((wrong for wrong in found if wrong), [])


def _both(one: Mapping[str, str] | None, other: Mapping[str, str] | None) -> bool:
    """True if two members reported digests, which were compared."""
    return one is not None and other is not None


async def in_time(work: Awaitable[T], what: str, timeout_s: float | None) -> T:
    """The result of `work` within `timeout_s`; None: without a limit.

    Raises:
        EngineLost: if it takes longer. An answer that came in time counts, even if this process looks
            late.
    """
    task, clock = asyncio.ensure_future(work), asyncio.get_running_loop().time
    began = clock()
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if timeout_s is not None and clock() - began > timeout_s + LATE_S:
            await asyncio.wait({task}, timeout=AGAIN_S)
        if not task.done():
            raise EngineLost(f"no answer within {timeout_s:g} s to {what}")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
