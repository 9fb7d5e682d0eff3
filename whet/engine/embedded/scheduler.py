"""Which tokens the next step computes: admission, chunked prefill, shared prompts, continued conversations, eviction, preemption.

Nothing here touches a tensor. A sequence's tokens up to `cached` have their keys and values in its blocks; the rest are pending. One
pending token is a decode step, several are a chunk of prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from whet.engine.base import EngineRefused
from whet.engine.embedded.cache import BlockPool, OutOfBlocks
from whet.types import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way."""

    request: Request
    arrival: int
    tokens: list[int]
    """Context and what was sampled so far."""
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    delivered: int = 0
    """Sampled tokens already handed out."""
    fresh: bool = True
    """Its prompt was not continued from anything cached, so siblings may fork from it."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def place(self) -> tuple[tuple[int, ...], int]:
        """Its place in the queue."""
        return self.request.rank, self.arrival


@dataclass(slots=True)
class Prefix:
    """Cached tokens that no running sequence owns: a finished turn, or a prompt that siblings share."""

    tokens: tuple[int, ...]
    blocks: list[int]


class Scheduler:
    """Plans steps over a block pool.

    Args:
        pool: the cache's blocks.
        copy_block: copies a block's contents, for copy on write.
        max_running: sequences that run at a time.
        max_batch_tokens: tokens that a step computes at most.
    """

    def __init__(
        self, pool: BlockPool, copy_block: Callable[[int, int], None], max_running: int, max_batch_tokens: int
    ) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self._copy_block = copy_block
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._conversations: OrderedDict[str, Prefix] = OrderedDict()
        self._prompts: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    @property
    def max_tokens(self) -> int:
        """Longest sequence that fits when it has the pool to itself."""
        return self.pool.num_blocks * self.pool.block_size

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            EngineRefused: if it could never fit.
        """
        request = sequence.request
        if not request.tokens:
            raise EngineRefused(f"request {request.id} has no tokens to continue")
        longest = len(request.tokens) + request.sampling.max_tokens
        if longest > self.max_tokens:
            raise EngineRefused(
                f"request {request.id}: {len(request.tokens)} prompt tokens + max_tokens {request.sampling.max_tokens} = {longest}, "
                f"but the cache holds {self.max_tokens} tokens; raise engine.cache_tokens or lower the limits"
            )
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.place)

    def plan(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step, each with how many of its pending tokens to compute. Their blocks are theirs to write."""
        planned: list[tuple[Sequence, int]] = []
        budget = self._max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: s.place):
            if budget == 0:
                break
            if sequence in self.running and self._reserve(sequence, new := min(sequence.pending, budget)):
                planned.append((sequence, new))
                budget -= new
        for sequence in list(self.waiting):
            if budget == 0 or len(self.running) >= self._max_running:
                break
            if self._led(sequence):
                continue
            new = self._admit(sequence, budget)
            if new == 0:
                break
            planned.append((sequence, new))
            budget -= new
        return planned

    def advance(self, sequence: Sequence, new: int) -> None:
        """Note that `new` pending tokens are cached now; a fresh prompt becomes shareable as soon as it is complete."""
        sequence.cached += new
        head = sequence.num_prompt - 1
        if sequence.fresh and head > 0 and sequence.cached >= head and sequence.num_sampled == 0:
            sequence.fresh = False
            key = sequence.request.tokens[:head]
            if key not in self._prompts:
                blocks = sequence.blocks[: self._blocks_for(head)]
                for block in blocks:
                    self.pool.hold(block)
                self._prompts[key] = Prefix(key, blocks)

    def finish(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence out; with `keep`, its conversation's next request continues on its cache."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        if keep and sequence.cached:
            self.release(sequence.request.conversation)
            self._conversations[sequence.request.conversation] = Prefix(
                tuple(sequence.tokens[: sequence.cached]), sequence.blocks
            )
            sequence.blocks = []
        self._drop(sequence.blocks)

    def release(self, conversation: str) -> None:
        """Forget what is cached of a conversation."""
        prefix = self._conversations.pop(conversation, None)
        if prefix is not None:
            self._drop(prefix.blocks)

    def drop_caches(self) -> None:
        """Forget every cached token, of running sequences too: they are computed again from their tokens."""
        for prefix in (*self._conversations.values(), *self._prompts.values()):
            self._drop(prefix.blocks)
        self._conversations.clear()
        self._prompts.clear()
        for sequence in list(self.running):
            self._preempt(sequence)

    def _led(self, sequence: Sequence) -> bool:
        """Whether a running sequence is just computing the same prompt: then it pays to wait and fork."""
        if sequence.num_sampled or sequence.request.conversation in self._conversations:
            return False
        return any(
            other.fresh and other.cached < other.num_prompt - 1 and other.request.tokens == sequence.request.tokens
            for other in self.running
        )

    def _admit(self, sequence: Sequence, budget: int) -> int:
        """Start a waiting sequence if its first chunk has room without preempting anyone. Returns the chunk's tokens, or 0."""
        self._adopt(sequence)
        new = min(sequence.pending, budget)
        if not self._make_room(self._blocks_wanted(sequence, new)):
            self._drop(sequence.blocks)
            sequence.cached = 0
            return 0
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self._take_blocks(sequence, new)
        return new

    def _adopt(self, sequence: Sequence) -> None:
        """Give a sequence whatever is cached of its beginning."""
        own = self._conversations.pop(sequence.request.conversation, None)
        if own is not None:
            same = _common(own.tokens, sequence.tokens)
            sequence.cached = min(same, len(sequence.tokens) - 1)
            keep = self._blocks_for(sequence.cached)
            sequence.blocks = own.blocks[:keep]
            self._drop(own.blocks[keep:])
        else:
            key = tuple(sequence.tokens[:-1]) if not sequence.num_sampled else ()
            shared = self._prompts.get(key)
            if shared is None:
                sequence.fresh = True
                return
            self._prompts.move_to_end(key)
            for block in shared.blocks:
                self.pool.hold(block)
            sequence.blocks, sequence.cached = list(shared.blocks), len(key)
        sequence.fresh = False

    def _reserve(self, sequence: Sequence, new: int) -> bool:
        """Make `new` more tokens of a running sequence writable, preempting others (the last first), itself at worst."""
        while not self._make_room(self._blocks_wanted(sequence, new)):
            victim = max(self.running, key=lambda s: s.place)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._take_blocks(sequence, new)
        return True

    def _blocks_wanted(self, sequence: Sequence, new: int) -> int:
        wanted = self._blocks_for(sequence.cached + new) - len(sequence.blocks)
        return wanted + (1 if self._must_copy(sequence) else 0)

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether the block that is written next is half full and shared."""
        return sequence.cached % self.pool.block_size != 0 and self.pool.shared(
            sequence.blocks[sequence.cached // self.pool.block_size]
        )

    def _take_blocks(self, sequence: Sequence, new: int) -> None:
        if self._must_copy(sequence):
            last = sequence.cached // self.pool.block_size
            mine = self.pool.allocate()
            self._copy_block(sequence.blocks[last], mine)
            self.pool.drop(sequence.blocks[last])
            sequence.blocks[last] = mine
        while len(sequence.blocks) < self._blocks_for(sequence.cached + new):
            sequence.blocks.append(self.pool.allocate())

    def _make_room(self, wanted: int) -> bool:
        """Evict shared prompts and idle conversations, oldest first, until `wanted` blocks are free."""
        while self.pool.num_free < wanted:
            for kept in (self._prompts, self._conversations):
                if kept:
                    _, prefix = kept.popitem(last=False)  # pyright: ignore[reportUnknownVariableType]
                    self._drop(prefix.blocks)
                    break
            else:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue: its tokens are kept, its cache is computed again."""
        self.running.remove(sequence)
        self._drop(sequence.blocks)
        sequence.cached = 0
        self.num_preempted += 1
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.place)

    def _drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pool.drop(block)
        blocks.clear()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)


def _common(a: tuple[int, ...], b: list[int]) -> int:
    """Length of the common prefix."""
    if len(a) <= len(b) and list(a) == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


__all__ = ["OutOfBlocks", "Prefix", "Scheduler", "Sequence"]
