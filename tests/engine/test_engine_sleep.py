"""An engine that sleeps while the trainer computes: it has given its memory back, and samples as ever once new weights have woken it."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import Qwen3Config

from tests.engine.engine_setup import DEVICE, SHAPE, engine_of, reply_to, tiny
from whet.engine.base import EngineFailed
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.types import Request, SamplingParams


def fresh(seed: int = 0, dtype: str = "float32", *, tied: bool = False) -> CausalModel:
    """A model of the test's own: its weights are written to."""
    shape = Qwen3Config(head_dim=16, tie_word_embeddings=tied, **SHAPE)
    return random_causal(shape, ModelConfig(path="", dtype=dtype, device=DEVICE), seed=seed)


def held(model: CausalModel) -> int:
    """Bytes of memory behind the weights."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for _, tensor in model.named_weights())}
    return sum(storages.values())


def asked(name: str = "r") -> Request:
    return Request(name, (3, 5, 7), SamplingParams(12, 1.0, seed=3))


async def answer(model: CausalModel) -> tuple[int, ...]:
    engine = engine_of(model)
    try:
        return (await reply_to(engine, asked())).tokens
    finally:
        await engine.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sleeping_engine_holds_neither_cache_nor_weights_and_new_weights_wake_it(dtype, tied):
    """float32: decoding is compiled, and reads the weights where they are then."""
    first, second = fresh(0, dtype, tied=tied), fresh(1, dtype, tied=tied)
    own = fresh(0, dtype, tied=tied)
    size = held(own)

    async def main():
        expected = [await answer(first), await answer(second)]
        engine = engine_of(own, shares=False)
        replies = [(await reply_to(engine, asked())).tokens]
        assert engine.core.store.size_bytes > 0 and held(own) == size
        for _ in range(2):
            await engine.sleep()
            assert engine.core.store.size_bytes == 0 and held(own) == 0
        waiting = asyncio.create_task(reply_to(engine, asked("waits")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        with pytest.raises(EngineFailed, match="sleeps until it is given weights"):
            await engine.score((3, 5, 7))
        await engine.update(list(second.named_weights()), 1)
        assert held(own) == size
        replies.append((await waiting).tokens)
        await engine.close()
        return expected, replies

    expected, replies = asyncio.run(main())
    assert replies == expected and expected[0] != expected[1]


def test_weights_that_are_the_trainers_stay():
    model = tiny()

    async def main():
        engine = engine_of(model)
        before = await reply_to(engine, asked())
        await engine.sleep()
        assert engine.core.store.size_bytes == 0 < held(model)
        await engine.update(list(model.named_weights()), 1)
        after = await reply_to(engine, asked("again"))
        await engine.close()
        return before.tokens, after.tokens

    before, after = asyncio.run(main())
    assert before == after


def test_what_is_wrong_with_new_weights_leaves_it_asleep():
    own = fresh(0)
    short = [(name, tensor) for name, tensor in fresh(1).named_weights()][1:]

    async def main():
        engine = engine_of(own, shares=False)
        await engine.sleep()
        with pytest.raises(ValueError, match="missing"):
            await engine.update(short, 1)
        waiting = asyncio.create_task(reply_to(engine, asked()))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "it sampled from whatever lay in the memory"
        with torch.no_grad():
            await engine.update(list(fresh(1).named_weights()), 1)
        reply = await waiting
        await engine.close()
        return reply.tokens

    assert asyncio.run(main()) == asyncio.run(answer(fresh(1)))
