"""The rows that decoding reads are what the blocks hold, and only ever those of the sequence and the weights at hand."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.engine_setup import ROUNDED, VOCAB, plain, plain_logprobs, tiny
from whet.engine.base import StaleCache
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.rows import DecodeSlab, capacity_for
from whet.engine.embedded.scheduler import Sequence
from whet.types import Request, SamplingParams


def core(**sizes: int) -> EngineCore:
    sizes = {"cache_tokens": 2048, "block_size": 4, "max_running": 32, "max_batch_tokens": 64} | sizes
    return EngineCore(tiny(), EmbeddedConfig(**sizes))


def ask(name: str, num_prompt: int, max_tokens: int) -> Request:
    prompt = tuple((3 * i + len(name)) % VOCAB for i in range(num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens, 1.0, seed=sum(map(ord, name))))


@torch.inference_mode()
def check_rows(engine: EngineCore) -> int:
    """Compare every row with the blocks of its sequence; how many there were."""
    count = 0
    for slab in engine.rows._slabs.values():
        assert len(slab.members) == len(slab.lengths) <= slab.num_rows
        for row, (sequence, length) in enumerate(zip(slab.members, slab.lengths, strict=True)):
            if sequence.num_cached_tokens != length:
                continue  # it went back to the queue in this step
            count += 1
            blocks = torch.tensor([sequence.blocks], device=engine.model.device)
            for layer, pair in slab.layers.items():
                for kept, held in zip(pair, engine.store.read(layer, blocks), strict=True):
                    assert torch.equal(kept[row, :, :length], held[0, :, :length]), (slab.capacity, row, layer)
    return count


@pytest.mark.parametrize("cache_tokens", [160, 2048])
def test_rows_hold_what_the_blocks_hold_whoever_comes_and_goes(cache_tokens):
    """Sequences of many lengths start, end and are taken out at random, the small cache preempts, and the weights' version changes."""
    rng = random.Random(cache_tokens)
    engine = core(cache_tokens=cache_tokens)
    live: list[Sequence] = []
    seen = resized = 0
    sizes: dict[int, int] = {}
    for step in range(300):
        if len(live) < 14 and rng.random() < (0.6 if step // 50 % 2 else 0.15):
            live.append(engine.add(ask(f"s{step}", rng.choice((1, 5, 14, 30)), rng.randrange(1, 60))))
        if live and rng.random() < 0.03:
            engine.finish(live.pop(rng.randrange(len(live))))
        if step in (120, 250):
            engine.begin_version(step)
            assert engine.num_cached_tokens == 0 and engine.rows.size_bytes == 0
        if engine.has_work:
            done = [item.sequence for item in engine.step() if item.finish is not None]
            seen += check_rows(engine)
            held = {capacity: slab.num_rows for capacity, slab in engine.rows._slabs.items()}
            assert sum(capacity * num for capacity, num in held.items()) <= engine.store.num_blocks * 4
            resized += sum(held[c] < sizes[c] for c in held.keys() & sizes.keys())
            sizes = held
            for sequence in done:
                live.remove(sequence)
                engine.finish(sequence)
    assert seen > 500 and resized > 0
    assert (engine.scheduler.num_preempted > 0) == (cache_tokens == 160)


def test_who_stays_keeps_its_row_and_a_hole_is_filled_from_the_end():
    a, b, c, d = (Sequence(ask(name, 3, 1), i, [1, 2, 3], num_cached_tokens=9) for i, name in enumerate("abcd"))
    slab = DecodeSlab(16)
    first = slab.assign([a, b, c], max_rows=8)
    assert (first.sequences, first.moves, first.loads) == ([a, b, c], [], [0, 1, 2])
    for sequence in (a, b, c):
        sequence.num_cached_tokens += 1
    second = slab.assign([c, b], max_rows=8)
    assert (second.sequences, second.moves, second.loads) == ([c, b], [(2, 0)], [])
    c.num_cached_tokens += 1
    b.num_cached_tokens += 2  # it got a token elsewhere, so that its row is a token short
    third = slab.assign([b, c, d], max_rows=8)
    assert (third.sequences, third.moves, third.loads) == ([c, b, d], [], [1, 2])


@pytest.mark.parametrize(("num", "expected"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_rows_double_in_length(num, expected):
    assert capacity_for(num, 4) == expected


def test_who_finds_no_room_is_gathered_and_says_the_same():
    """Rows of 128 places for sequences of 70: two fit in a cache of 256 tokens, the third is read from its blocks."""
    requests = [ask(name, 66, 12) for name in ("a", "bb", "ccc")]
    replies: dict[str, Sequence] = {}
    engine = core(cache_tokens=256)
    for request in requests:
        engine.add(request)
    most = 0
    while engine.has_work:
        for item in engine.step():
            most = max(most, sum(len(slab.members) for slab in engine.rows._slabs.values()))
            if item.finish is not None:
                replies[item.sequence.request.id] = item.sequence
                engine.finish(item.sequence)
    assert most == 2
    for request in requests:
        reply = replies[request.id]
        table = plain_logprobs(plain(), tuple(reply.tokens))[len(request.tokens) - 1 : -1]
        expected = table.gather(-1, torch.tensor(reply.tokens[len(request.tokens) :])[:, None]).squeeze(-1).tolist()
        assert reply.logprobs == pytest.approx(expected, rel=ROUNDED, abs=1e-8)


def test_rows_of_older_weights_are_counted_and_never_read():
    engine = core()
    engine.add(ask("a", 10, 20))
    for _ in range(4):
        engine.step()
    drop, engine.rows.clear = engine.rows.clear, lambda: None  # type: ignore[method-assign]
    engine.begin_version(1)
    assert engine.num_cached_tokens == 13, "a receipt tells of what was left"
    with pytest.raises(StaleCache, match="13 tokens lie ready for decoding from the weights of an older version"):
        engine.step()
    drop()
    engine.forget()
    while engine.has_work:
        for item in engine.step():
            if item.finish is not None:
                engine.finish(item.sequence)


def test_a_score_of_a_long_text_is_mostly_prefill():
    engine = core(cache_tokens=256, max_running=16)
    tokens = tuple((5 * i + 1) % VOCAB for i in range(201))
    forwards: list[int] = []
    forward = engine._forward

    def counted(plan):
        forwards.append(sum(new for _, new in plan))
        return forward(plan)

    engine._forward = counted  # type: ignore[method-assign]
    found = engine.score(tokens, 1.0).logprobs
    assert forwards == [64, 64, 64, 3, 1, 1, 1, 1, 1] and sum(forwards) == 200
    table = plain_logprobs(plain(), tokens)
    assert found == pytest.approx([float(table[i, t]) for i, t in enumerate(tokens[1:])], abs=1e-8)
    assert engine.rows.size_bytes == 0
