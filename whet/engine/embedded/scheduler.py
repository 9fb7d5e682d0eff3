"""Which tokens the next step computes: admission, chunked prefill, shared prompts, continued conversations, eviction, preemption.

Nothing here touches a tensor. A sequence's tokens up to `cached` have their keys and values in its blocks; the rest are pending. One
pending token is a decode step, several are a chunk of prefill.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from whet.engine.embedded.cache import BlockPool
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
    raw_logprobs: list[float] = field(default_factory=list)
    """Filled where the request asks for them, like the next one."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    delivered: int = 0
    """Sampled tokens already handed out."""
    fresh: bool = True
    """It continues nothing cached, and its prompt is not in the cache of shared prompts yet."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_raw(self) -> bool:
        return self.request.sampling.raw_logprobs or self.request.sampling.top_logprobs > 0

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def num_shareable(self) -> int:
        """Prompt tokens that siblings may share: all but the last, which each computes to know what follows it."""
        return self.num_prompt - 1

    @property
    def leads(self) -> bool:
        """Whether it is computing a prompt that siblings can fork from as soon as it is complete."""
        return self.fresh and self.cached < self.num_shareable


def _place(sequence: Sequence) -> tuple[tuple[int, ...], int]:
    """Its place in the queue."""
    return sequence.request.rank, sequence.arrival


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
        """By place, like `running`."""
        self.running: list[Sequence] = []
        self.num_preempted = 0
        """Times that a running sequence went back to the queue because blocks ran out."""
        self._copy_block = copy_block
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._conversations: OrderedDict[str, Prefix] = OrderedDict()
        self._prompts: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

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
            new = min(sequence.pending, max(1, budget - behind))  # a long prefill leaves a token to everyone behind it
            if not self._reserve(sequence, new):
                break
            planned.append((sequence, new))
            budget -= new
        self._admit_waiting(planned, budget)
        return planned

    def advance(self, sequence: Sequence, new: int) -> None:
        """Note that `new` pending tokens are cached now; a fresh prompt becomes shareable as soon as it is complete."""
        sequence.cached += new
        head = sequence.num_shareable
        if not sequence.fresh or sequence.cached < head or head == 0:
            return
        sequence.fresh = False
        key = sequence.request.tokens[:head]
        if key not in self._prompts:
            self._prompts[key] = Prefix(key, self._hold(sequence.blocks[: self.pool.blocks_for(head)]))

    def finish(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence out; with `keep`, its conversation's next request continues on its cache."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if keep and sequence.cached:
            name = sequence.request.conversation
            self.release(name)
            blocks = self._hold(sequence.blocks[: self.pool.blocks_for(sequence.cached)])
            self._conversations[name] = Prefix(tuple(sequence.tokens[: sequence.cached]), blocks)
        self.give_back(sequence.blocks)

    def release(self, conversation: str) -> None:
        """Forget what is cached of a conversation."""
        prefix = self._conversations.pop(conversation, None)
        if prefix is not None:
            self.give_back(prefix.blocks)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the cache, of running sequences and of idle prefixes."""
        prefixes = [*self._conversations.values(), *self._prompts.values()]
        return sum(len(prefix.tokens) for prefix in prefixes) + sum(sequence.cached for sequence in self.running)

    def drop_caches(self) -> None:
        """Forget every cached token, of running sequences too: they are computed again from their tokens."""
        while self._evict():
            pass
        while self.running:
            self._requeue(self.running[-1])

    def lend(self, num_tokens: int) -> list[int]:
        """Blocks for that many tokens, evicting and preempting as needed; they come back through `give_back`."""
        wanted = self.pool.blocks_for(num_tokens)
        while self.pool.num_free < wanted and (self._evict() or self._preempt_last()):
            pass
        return [self.pool.allocate() for _ in range(wanted)]

    def give_back(self, blocks: list[int]) -> None:
        """Hold these blocks no longer; empties the list."""
        for block in blocks:
            self.pool.drop(block)
        blocks.clear()

    def _admit_waiting(self, planned: list[tuple[Sequence, int]], budget: int) -> None:
        """Start waiting sequences, in their order, while there is room: nobody overtakes one that has to wait for blocks."""
        leading = {sequence.request.tokens for sequence in self.running if sequence.leads}
        index = 0
        while index < len(self.waiting) and budget > 0 and len(self.running) < self._max_running:
            sequence = self.waiting[index]
            if self._waits_to_fork(sequence, leading):
                index += 1
                continue
            if not self._admit(sequence):
                return
            new = min(sequence.pending, budget)
            planned.append((sequence, new))
            budget -= new
            if sequence.leads:
                leading.add(sequence.request.tokens)

    def _waits_to_fork(self, sequence: Sequence, leading: set[tuple[int, ...]]) -> bool:
        """Whether a running sequence is just computing the same prompt: then it pays to wait and fork."""
        return bool(leading) and sequence.request.conversation not in self._conversations and sequence.request.tokens in leading

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence if there is room for all of its pending tokens without preempting anyone."""
        self._adopt(sequence)
        if not self._can_fit(sequence) or not self._make_room(sequence, sequence.pending):
            self.give_back(sequence.blocks)
            sequence.cached, sequence.fresh = 0, True
            return False
        self.release(sequence.request.conversation)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_place)
        self._take_blocks(sequence, sequence.pending)
        return True

    def _adopt(self, sequence: Sequence) -> None:
        """Give a sequence whatever is cached of its beginning: its conversation's history, or a sibling's prompt."""
        own = self._conversations.get(sequence.request.conversation)
        head = sequence.request.tokens[:-1]
        shared = self._prompts.get(head)
        if own is not None and (length := _common(own.tokens, sequence.tokens)):
            prefix, cached = own, min(length, len(sequence.tokens) - 1)
        elif shared is not None:
            self._prompts.move_to_end(head)
            prefix, cached = shared, len(head)
        else:
            return
        sequence.blocks = self._hold(prefix.blocks[: self.pool.blocks_for(cached)])
        sequence.cached, sequence.fresh = cached, False

    def _can_fit(self, sequence: Sequence) -> bool:
        """Whether evicting everything idle would make room: if not, nothing is evicted in vain."""
        wanted = self.pool.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        if wanted <= self.pool.num_free:
            return True
        busy = set(sequence.blocks).union(*(other.blocks for other in self.running))
        return wanted <= self.pool.num_blocks - len(busy)

    def _reserve(self, sequence: Sequence, new: int) -> bool:
        """Make `new` more tokens of a running sequence writable, preempting others (the last first), itself at worst."""
        while not self._make_room(sequence, new):
            itself = self.running[-1] is sequence
            self._preempt_last()
            if itself:
                return False
        self._take_blocks(sequence, new)
        return True

    def _make_room(self, sequence: Sequence, new: int) -> bool:
        """Evict until a sequence can have the blocks that its next `new` tokens want."""
        while self.pool.num_free < self._blocks_wanted(sequence, new):  # asked anew: an eviction may end the need to copy
            if not self._evict():
                return False
        return True

    def _blocks_wanted(self, sequence: Sequence, new: int) -> int:
        more = self.pool.blocks_for(sequence.cached + new) - len(sequence.blocks)
        return max(0, more) + self._must_copy(sequence)

    def _must_copy(self, sequence: Sequence) -> bool:
        """Whether the block that is written next is partly filled and shared."""
        index, used = divmod(sequence.cached, self.pool.block_size)
        return used > 0 and self.pool.shared(sequence.blocks[index])

    def _take_blocks(self, sequence: Sequence, new: int) -> None:
        if self._must_copy(sequence):
            last = sequence.cached // self.pool.block_size
            self.pool.check_fresh([sequence.blocks[last]])  # a copy would pass for new
            mine = self.pool.allocate()
            self._copy_block(sequence.blocks[last], mine)
            self.pool.drop(sequence.blocks[last])
            sequence.blocks[last] = mine
        while len(sequence.blocks) < self.pool.blocks_for(sequence.cached + new):
            sequence.blocks.append(self.pool.allocate())

    def _evict(self) -> bool:
        """Forget the oldest shared prompt, or else the conversation that has been idle longest. False: nothing is idle."""
        if self._prompts:
            prefix = self._prompts.popitem(last=False)[1]
        elif self._conversations:
            prefix = self._conversations.popitem(last=False)[1]
        else:
            return False
        self.give_back(prefix.blocks)
        return True

    def _preempt_last(self) -> bool:
        if not self.running:
            return False
        self._requeue(self.running[-1])
        self.num_preempted += 1
        return True

    def _requeue(self, sequence: Sequence) -> None:
        """Back to the queue: its tokens are kept, its cache is computed again."""
        self.running.remove(sequence)
        self.give_back(sequence.blocks)
        sequence.cached, sequence.fresh = 0, True
        insort(self.waiting, sequence, key=_place)

    def _hold(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self.pool.hold(block)
        return blocks


def _common(a: tuple[int, ...], b: list[int]) -> int:
    """Length of the common prefix."""
    if a == tuple(b[: len(a)]):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
