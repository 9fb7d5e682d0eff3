"""Which tokens the next step computes: admission, chunked prefill, cached beginnings, preemption.

Nothing here touches a tensor. A sequence's tokens up to `cached` have their keys and values in its blocks; the rest are pending. One
pending token is a decode step, several are a chunk of prefill.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from whet.engine.embedded.cache import BlockPool
from whet.engine.embedded.grammar import Matching
from whet.types import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way."""

    request: Request
    arrival: int
    tokens: list[int]
    """Context and what was sampled so far."""
    num_cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Digests of its full blocks, each with everything before it."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    """Filled where the request asks for them, like the next two."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    nucleus: list[bytes] = field(default_factory=list)
    routes: bytearray = field(default_factory=bytearray)
    """Experts of its tokens as they were first computed, token after token, if the request asks for them."""
    matching: Matching | None = None
    """State of the reply in its grammar, if it has one."""
    num_prefix_hits: int | None = None
    """Tokens that were in the cache when it was first let in; None: it was not yet."""
    delivered: int = 0
    """Sampled tokens already handed out."""
    admitted_at: float | None = None
    """Time at which it was first let in; None: it was not yet."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_replied(self) -> int:
        """Tokens of the reply, those that were sampled before this request included."""
        return self.num_sampled + self.request.num_begun

    @property
    def wants_raw(self) -> bool:
        return self.request.sampling.raw_logprobs or self.request.sampling.top_logprobs > 0

    @property
    def num_pending_tokens(self) -> int:
        return len(self.tokens) - self.num_cached_tokens

    @property
    def num_shareable(self) -> int:
        """Prompt tokens that siblings may share: all but the last, which each computes to know what follows it."""
        return self.num_prompt - 1

    @property
    def is_fork_source(self) -> bool:
        """True while it computes a prompt that siblings can fork from as soon as it is complete."""
        return self.num_cached_tokens < self.num_shareable


def _place(sequence: Sequence) -> tuple[tuple[int, ...], int]:
    """Its place in the queue."""
    return sequence.request.rank, sequence.arrival


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
        """By place, like `running`."""
        self.running: list[Sequence] = []
        self.num_preempted = 0
        """Times that a running sequence went back to the queue because blocks ran out."""
        self._copy_block = copy_block
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the pool must be able to hold it, with all that it may sample."""
        insort(self.waiting, sequence, key=_place)

    def plan(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step, each with how many of its pending tokens to compute. Their blocks are theirs to write."""
        planned: list[tuple[Sequence, int]] = []
        budget = self._max_batch_tokens
        while budget > 0 and len(planned) < len(self.running):
            sequence = self.running[len(planned)]
            behind = len(self.running) - len(planned) - 1
            new = min(sequence.num_pending_tokens, max(1, budget - behind))  # a long prefill leaves a token to everyone behind it
            if not self._reserve(sequence, new):
                break
            planned.append((sequence, new))
            budget -= new
        self._admit_waiting(planned, budget)
        return planned

    def advance(self, sequence: Sequence, new: int) -> None:
        """Note that `new` pending tokens are cached now. Full blocks can be shared from then on, a prompt as soon as it is complete."""
        was_source = sequence.is_fork_source
        sequence.num_cached_tokens += new
        size = self.pool.block_size
        while (len(sequence.digests) + 1) * size <= sequence.num_cached_tokens:
            digest = self._note_next(sequence, size)
            assert digest is not None
            sequence.digests.append(digest)
        if was_source and not sequence.is_fork_source:
            self._note_tail(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out; what it cached can be found until its blocks are wanted."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._leave(sequence)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache, of running sequences and of idle blocks."""
        return self.pool.num_idle_tokens + sum(sequence.num_cached_tokens for sequence in self.running)

    def drop_caches(self) -> None:
        """Forget every cached token, of running sequences too: they are computed again from their tokens."""
        while self.running:
            self._requeue(self.running[-1])
        self.pool.forget()

    def allocate(self, num_tokens: int) -> list[int]:
        """Allocate blocks for that many tokens, preempting as needed; `free` takes them back."""
        wanted = self.pool.blocks_for(num_tokens)
        while self.pool.num_free < wanted and self._preempt_last():
            pass
        return [self.pool.allocate() for _ in range(wanted)]

    def free(self, blocks: list[int]) -> None:
        """Hold these blocks no longer; empties the list. A beginning outlives what follows it: it is of more use."""
        while blocks:
            self.pool.drop(blocks.pop())

    def _admit_waiting(self, planned: list[tuple[Sequence, int]], budget: int) -> None:
        """Start waiting sequences, in their order, while there is room: nobody overtakes one that has to wait for blocks."""
        in_prefill = {sequence.request.tokens for sequence in self.running if sequence.is_fork_source}
        index = 0
        while index < len(self.waiting) and budget > 0 and len(self.running) < self._max_running:
            sequence = self.waiting[index]
            if sequence.request.tokens in in_prefill:  # its sibling is just computing the same prompt: it pays to wait and fork
                index += 1
                continue
            if not self._admit(sequence):
                return
            new = min(sequence.num_pending_tokens, budget)
            planned.append((sequence, new))
            budget -= new
            if sequence.is_fork_source:
                in_prefill.add(sequence.request.tokens)

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence, from what is cached of it, if there is room for all of its tokens without preempting anyone."""
        match = self.pool.index.match(sequence.tokens, len(sequence.tokens) - 1)
        for block in match.blocks:
            self.pool.hold(block)
        wanted = self.pool.blocks_for(len(sequence.tokens)) - len(match.blocks)
        if self.pool.num_free < wanted:
            self.free(match.blocks)
            return False
        sequence.blocks, sequence.digests = match.blocks, match.digests
        sequence.num_cached_tokens = len(match.blocks) * self.pool.block_size
        if match.tail is not None:
            self._fork_tail(sequence, match.tail, match.num_tail, wanted)
        if sequence.num_prefix_hits is None:
            sequence.num_prefix_hits, sequence.admitted_at = sequence.num_cached_tokens, time.monotonic()
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_place)
        self._take_blocks(sequence, sequence.num_pending_tokens)
        return True

    def _fork_tail(self, sequence: Sequence, tail: int, num_tail: int, wanted: int) -> None:
        """Copy a block whose first `num_tail` tokens come next, unless it is itself among the last blocks that the sequence wants."""
        self.pool.check_fresh([tail])  # a copy would pass for new
        self.pool.hold(tail)
        if self.pool.num_free >= wanted:
            mine = self.pool.allocate()
            self._copy_block(tail, mine)
            sequence.blocks.append(mine)
            sequence.num_cached_tokens += num_tail
        self.pool.drop(tail)

    def _reserve(self, sequence: Sequence, new: int) -> bool:
        """Make `new` more tokens of a running sequence writable, preempting others (the last first), itself at worst."""
        wanted = self.pool.blocks_for(sequence.num_cached_tokens + new) - len(sequence.blocks)
        while self.pool.num_free < wanted:
            itself = self.running[-1] is sequence
            self._preempt_last()
            if itself:
                return False
        self._take_blocks(sequence, new)
        return True

    def _take_blocks(self, sequence: Sequence, new: int) -> None:
        while len(sequence.blocks) < self.pool.blocks_for(sequence.num_cached_tokens + new):
            sequence.blocks.append(self.pool.allocate())

    def _note_next(self, sequence: Sequence, count: int) -> bytes | None:
        """Have the first `count` tokens of the block after the full ones found by others; its digest if that fills it."""
        done = len(sequence.digests)
        first = done * self.pool.block_size
        before = sequence.digests[-1] if done else self.pool.index.root
        return self.pool.index.note(sequence.blocks[done], before, tuple(sequence.tokens[first : first + count]))

    def _note_tail(self, sequence: Sequence) -> None:
        count = sequence.num_cached_tokens - len(sequence.digests) * self.pool.block_size
        if count:
            self._note_next(sequence, count)

    def _preempt_last(self) -> bool:
        if not self.running:
            return False
        self._requeue(self.running[-1])
        self.num_preempted += 1
        return True

    def _requeue(self, sequence: Sequence) -> None:
        """Back to the queue: its tokens are kept, and so is its cache until its blocks are wanted."""
        self.running.remove(sequence)
        self._leave(sequence)
        insort(self.waiting, sequence, key=_place)

    def _leave(self, sequence: Sequence) -> None:
        """Let go of a sequence's blocks."""
        self._note_tail(sequence)
        self.free(sequence.blocks)
        sequence.digests.clear()
        sequence.num_cached_tokens = 0
