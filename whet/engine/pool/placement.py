"""Which member of a pool gets what: a conversation stays where it is, what is new goes where the fewest are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from whet.engine.base import EngineLost
from whet.engine.pool.member import M, Slot, State
from whet.engine.pool.reply import PooledReply


def choose(slots: Sequence[Slot[M]], home: Slot[M] | None, avoided: Collection[str] = ()) -> Slot[M] | None:
    """The member that a conversation stays with, or else the one with the fewest requests; None: no
    member can take it now."""
    if home is not None and _takes(home, avoided):
        return home
    best, least = None, 0
    for slot in slots:
        load = slot.load
        if (best is None or load < least) and _takes(slot, avoided):
            best, least = slot, load
    return best


def _takes(slot: Slot[M], avoided: Collection[str]) -> bool:
    return slot.state is State.SERVING and slot.member is not None and slot.breaker.lets_pass and slot.name not in avoided


def others(slots: Sequence[Slot[M]], failed_at: Collection[str]) -> bool:
    """True if a member serves, or may serve again, with which the request has not failed."""
    return any(slot.state in (State.SERVING, State.DOWN) and slot.name not in failed_at for slot in slots)


def settle(conversation: str, slot: Slot[M]) -> None:
    slot.conversations.add(conversation)
    if slot.member is not None:
        with suppress(EngineLost):  # who is lost is seen by its requests, and looked for
            slot.member.open(conversation)


def leave(conversation: str, slot: Slot[M]) -> None:
    slot.conversations.discard(conversation)
    if slot.member is not None:
        with suppress(EngineLost):
            slot.member.release(conversation)


def in_flight(slot: Slot[M], replies: Mapping[str, PooledReply]) -> tuple[str, ...]:
    """The requests of a member, a line each, without a word of what they say."""
    found = [(name, replies[name]) for name in sorted(slot.requests) if name in replies]
    return tuple(
        f"{name}: {len(reply.request.tokens)} tokens of context, {reply.num_sampled} of at most "
        f"{reply.request.sampling.max_tokens} sampled and handed over"
        for name, reply in found
    )
