"""The scheduler without a model: a step is `plan`, then `advance` and one sampled token for whoever has nothing pending."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.engine.embedded.cache import BlockPool, KVStore, OutOfBlocks
from whet.engine.embedded.scheduler import Scheduler, Sequence
from whet.types import Request, SamplingParams


class Machine:
    """A scheduler, and what its blocks would hold: the tokens, to check that every sequence finds its own."""

    def __init__(self, num_blocks: int, block_size: int = 4, max_running: int = 8, max_batch_tokens: int = 64) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, self._copy, max_running, max_batch_tokens)
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.arrivals = 0

    def _copy(self, source: int, target: int) -> None:
        size = self.pool.block_size
        self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]

    def add(self, tokens: range | list[int], max_tokens: int = 8, name: str = "", rank: tuple[int, ...] = ()) -> Sequence:
        request = Request(str(self.arrivals), tuple(tokens), SamplingParams(max_tokens), name, rank)
        sequence = Sequence(request, self.arrivals, list(tokens))
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def slot(self, sequence: Sequence, position: int) -> int:
        size = self.pool.block_size
        return sequence.blocks[position // size] * size + position % size

    def step(self) -> dict[Sequence, int]:
        planned = self.scheduler.plan()
        self.pool.check_fresh(block for sequence, _ in planned for block in sequence.blocks)
        for sequence, new in planned:
            for position in range(sequence.num_cached_tokens, sequence.num_cached_tokens + new):
                block = sequence.blocks[position // self.pool.block_size]
                assert not self.pool.shared(block), "a shared block was about to be written"
                self.slots[self.slot(sequence, position)] = sequence.tokens[position]
        for sequence, new in planned:
            self.scheduler.advance(sequence, new)
        for sequence, _ in planned:
            held = [self.slots[self.slot(sequence, p)] for p in range(sequence.num_cached_tokens)]
            assert held == sequence.tokens[: sequence.num_cached_tokens], "a sequence does not find its own tokens"
            if sequence.num_pending_tokens == 0:
                sequence.tokens.append(1000 + len(sequence.tokens))
        return dict(planned)

    def end(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.finish(sequence)
        self.scheduler.drop_caches()
        assert self.pool.num_free == self.pool.num_blocks


def test_blocks_are_counted():
    pool = BlockPool(2, 4)
    a, b = pool.allocate(), pool.allocate()
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.hold(a)
    pool.drop(a)
    assert (pool.num_free, pool.shared(a)) == (0, False)
    pool.drop(a)
    pool.drop(b)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="is free"):
        pool.drop(a)


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_blocks_for_tokens(tokens, expected):
    assert BlockPool(9, 4).blocks_for(tokens) == expected


def test_a_long_prompt_is_cut_and_decoding_goes_on_beside_it():
    machine = Machine(32, max_batch_tokens=10)
    quick = machine.add(range(3))
    assert machine.step() == {quick: 3}
    long = machine.add(range(100, 125))
    steps = [machine.step() for _ in range(4)]
    assert steps == [{quick: 1, long: 9}, {quick: 1, long: 9}, {quick: 1, long: 7}, {quick: 1, long: 1}]
    machine.end(quick, long)


def test_a_long_prefill_leaves_a_token_to_those_behind_it():
    machine = Machine(32, max_batch_tokens=10)
    behind = [machine.add([i, i + 1], rank=(5,)) for i in range(3)]
    machine.step()
    long = machine.add(range(100, 130), rank=(0,))
    machine.step()
    assert machine.step() == {long: 7, **dict.fromkeys(behind, 1)}
    machine.end(long, *behind)


def test_admission_follows_rank_then_arrival_and_nobody_overtakes():
    machine = Machine(6, max_running=8)
    sequences = [machine.add([10 * i] * 7, max_tokens=1, rank=(r,)) for i, r in enumerate((2, 0, 1, 0))]
    assert list(machine.step()) == [sequences[1], sequences[3], sequences[2]]  # 2 blocks each
    tiny = machine.add([7], max_tokens=1, rank=(9,))
    machine.scheduler.finish(sequences[1])
    machine.scheduler.finish(sequences[3])
    assert set(machine.step()) == {sequences[2], sequences[0], tiny}
    machine.end(sequences[0], sequences[2], tiny)


def test_max_running_is_a_limit():
    machine = Machine(32, max_running=2)
    sequences = [machine.add([i]) for i in range(3)]
    assert list(machine.step()) == sequences[:2]
    machine.scheduler.finish(sequences[0])
    assert list(machine.step()) == sequences[1:]
    machine.end(*sequences[1:])


def test_the_last_in_line_is_preempted_and_comes_back_with_all_its_tokens():
    machine = Machine(5)
    first, last = machine.add(range(8), 9), machine.add(range(20, 28), 9)
    while machine.scheduler.num_preempted == 0:
        machine.step()
    assert machine.scheduler.running == [first] and last.blocks == [] and last.num_cached_tokens == 0
    sampled = last.tokens[8:]
    assert sampled
    while machine.scheduler.waiting:
        machine.step()
        if first.num_sampled == 9 and first in machine.scheduler.running:
            machine.scheduler.finish(first)
    assert last.tokens[8 : 8 + len(sampled)] == sampled and last.num_pending_tokens in (0, 1)
    machine.end(last)


def test_siblings_wait_for_the_first_one_and_others_do_not_wait_for_them():
    machine = Machine(64, max_batch_tokens=6)
    first, sibling = machine.add(range(11)), machine.add(range(11))
    other = machine.add([50])
    assert machine.step() == {first: 6}
    assert machine.step() == {first: 5, other: 1}
    assert machine.step() == {first: 1, other: 1, sibling: 1}
    machine.end(first, sibling, other)


def test_forks_share_whole_blocks_and_copy_the_one_they_write():
    machine = Machine(64)
    siblings = [machine.add(range(11)) for _ in range(4)]
    for _ in range(3):
        machine.step()
    tables = [sequence.blocks for sequence in siblings]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4
    machine.end(*siblings)


def test_a_copy_that_there_is_no_room_for_is_computed_again():
    """The pool is full of one prompt: the block to copy is the one that is wanted."""
    machine = Machine(2)
    first = machine.add(range(7), max_tokens=1)
    machine.step()
    machine.scheduler.finish(first)
    second = machine.add(range(7), max_tokens=1)
    assert machine.step() == {second: 3}
    machine.end(second)


def play_one(machine: Machine, tokens: range | list[int]) -> int:
    """One request, to its end after a token; how much was computed."""
    sequence = machine.add(tokens, max_tokens=1)
    (computed,) = machine.step().values()
    machine.scheduler.finish(sequence)
    return computed


def test_the_block_unused_longest_goes_first_and_a_beginning_outlives_what_follows():
    machine = Machine(6)
    old, new = [*range(100, 108), 1], [*range(200, 208), 1]  # 3 blocks each
    assert [play_one(machine, old), play_one(machine, new)] == [9, 9]
    assert machine.scheduler.num_cached_tokens == 18 and machine.pool.num_free == 6
    assert play_one(machine, old) == 1, "used again, so it is the younger now; its last token took the place of the old last block"
    assert play_one(machine, range(300, 307)) == 7  # takes the last two blocks of `new`
    assert play_one(machine, new) == 5, "its first block was still there"
    machine.end()


def test_a_common_beginning_is_shared_whatever_follows():
    machine = Machine(32)
    assert play_one(machine, [*range(10), 50, 51]) == 12
    assert play_one(machine, [*range(10), 60]) == 1  # two blocks shared, two tokens copied
    assert play_one(machine, [*range(6), 70, 71]) == 2
    assert play_one(machine, [9, *range(10)]) == 11
    machine.end()


def test_a_preempted_sequence_finds_what_is_left_of_its_cache():
    machine = Machine(8)
    first, last = machine.add(range(8), 9), machine.add(range(20, 28), 9)  # 2 blocks each, a third with the next token
    machine.step()
    blocks = machine.scheduler.allocate(20)
    assert machine.scheduler.running == [first] and machine.scheduler.waiting == [last] and last.num_pending_tokens == 9
    machine.scheduler.free(blocks)
    assert machine.step() == {first: 1, last: 5}, "one of its two blocks was lent"
    machine.end(first, last)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_crowd_finds_its_own_tokens_and_leaves_nothing(data):
    """Prompts over two ids, so that beginnings are shared in every way; `Machine.step` checks what each sequence finds."""
    block_size = data.draw(st.sampled_from([1, 2, 4]))
    machine = Machine(data.draw(st.integers(16 // block_size, 40 // block_size)), block_size, 4, data.draw(st.integers(1, 20)))
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "finish", "update"]))
        if what == "add":
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
            live.append(machine.add(prompt, 6, rank=(data.draw(st.integers(0, 2)),)))
        elif what == "finish" and live:
            machine.scheduler.finish(live.pop(data.draw(st.integers(0, len(live) - 1))))
        elif what == "update":
            machine.scheduler.drop_caches()
            assert machine.scheduler.num_cached_tokens == 0
            machine.pool.begin_epoch()
        elif live:
            machine.step()
        for sequence in [sequence for sequence in live if sequence.num_sampled == 6]:
            live.remove(sequence)
            machine.scheduler.finish(sequence)
        held = {block for sequence in live for block in sequence.blocks}
        assert machine.pool.num_free == machine.pool.num_blocks - len(held)
    machine.end(*live)


def test_idle_caches_do_not_hold_up_admission():
    machine = Machine(8)
    play_one(machine, range(8))
    busy = machine.add(range(200, 216), max_tokens=1)
    machine.step()
    waiting = machine.add(range(300, 322), max_tokens=1)
    assert machine.step() == {busy: 1}
    machine.scheduler.finish(busy)
    assert machine.step() == {waiting: 22}
    machine.end(waiting)


def test_lent_blocks_come_from_idle_caches_and_then_from_the_last_in_line():
    machine = Machine(6)
    first, last = machine.add(range(8), name="a"), machine.add(range(20, 28), name="b")
    machine.step()
    blocks = machine.scheduler.allocate(12)
    assert len(blocks) == 3 and machine.scheduler.running == [first] and machine.scheduler.waiting == [last]
    machine.scheduler.free(blocks)
    assert blocks == []
    machine.end(first, last)


@pytest.mark.skipif(sys.platform != "linux", reason="how much memory there is in use is asked of Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_cache_takes_memory_for_what_is_written_into_it(dtype):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    store, new = KVStore(1000, 64), torch.ones(2, 32, 64, dtype=dtype)
    before = resident_bytes()
    store.write(0, torch.tensor([5, 63_999]), new, new)
    assert store.size_bytes >= 500_000_000 and resident_bytes() - before < 50_000_000
    keys, values = store.gathered(0, torch.tensor([[0, 999]]))
    assert torch.equal(keys[0, :, [5, 127]].transpose(0, 1), new) and torch.equal(keys, values)
    assert keys.count_nonzero() == new.numel()
    store.clear()
    assert resident_bytes() - before < 50_000_000
