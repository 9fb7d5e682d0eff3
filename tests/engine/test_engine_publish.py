"""A version counts only when the engine proves that it holds the trainer's weights."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import Qwen3Config

from whet.core.nonfinite import NonFinite
from whet.engine.base import EngineFailed, EngineLost
from whet.engine.embedded import engine as engine_module
from whet.engine.embedded import rows as rows_module
from whet.engine.embedded.compiled.native import NativeDecode
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.publish import EnginePublisher, SyncError
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.base import TransportError
from whet.types import Request, SamplingParams, Scored

SHAPE = Qwen3Config(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    tie_word_embeddings=False,
)


DEVICE = os.environ.get("WHET_TEST_DEVICE", "cpu")


def model(seed: int = 0, dtype: str = "float32"):
    return random_causal(SHAPE, ModelConfig(path="", device=DEVICE, dtype=dtype), seed=seed)


def publish(trainer, engine_model, *, shares: bool, sabotage=None, version: int = 1):
    """Publish the trainer's weights; `sabotage` acts on the engine right after it took them over."""

    async def main():
        with ThreadPoolExecutor(1) as thread:
            config = EmbeddedConfig(cache_tokens=256)
            engine = EmbeddedEngine(engine_model, config, thread, shares_weights=shares, deterministic=True)
            if sabotage is not None:
                update = engine.update

                async def sabotaged(weights, number):
                    return await sabotage(engine, update, weights, number)

                engine.update = sabotaged
            backend = TorchBackend(trainer, TrainConfig(), None)
            try:
                return await EnginePublisher(backend, trainer, engine, thread).publish(version), engine.version
            finally:
                await engine.close()

    return asyncio.run(main())


def test_shared_weights_are_proven_without_moving():
    trainer = model()
    published, version = publish(trainer, trainer, shares=True, version=7)
    assert published.receipt.version == version == 7
    assert published.receipt.wire.items() <= published.receipt.resident.items()
    assert 0 <= published.proof.probe_nats < 1e-4


def test_a_copy_arrives_whole():
    trainer, other = model(0), model(1)
    published, _ = publish(trainer, other, shares=False)
    assert published.receipt.size_bytes == sum(tensor.nbytes for _, tensor in trainer.named_weights())
    for (name, mine), (_, theirs) in zip(trainer.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(mine, theirs), name


def test_what_the_outputs_depend_on_besides_parameters_is_proven_too():
    """A buffer of the engine's that is off, and a tied head that is no longer tied: no weight that arrives tells of them."""

    def off(own_model):
        own_model.hf.get_submodule("model.rotary_emb").inv_freq[1] *= 1.001

    async def sabotage(engine, update, weights, version):
        off(engine.core.model)
        return await update(weights, version)

    with pytest.raises(SyncError, match=r"holds other weights than the trainer's: model\.rotary_emb\.inv_freq$"):
        publish(model(0), model(1), shares=False, sabotage=sabotage)


def test_a_tied_head_that_is_no_longer_tied_is_named():
    tied = Qwen3Config(**{**SHAPE.to_dict(), "tie_word_embeddings": True})
    mine, theirs = (random_causal(tied, ModelConfig(path="", device=DEVICE), seed=seed) for seed in (0, 1))

    async def untie(engine, update, weights, version):
        head = engine.core.model.hf.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        return await update(weights, version)

    with pytest.raises(SyncError, match=r"refused the weights: .* \(1\): lm_head\.weight$"):
        publish(mine, theirs, shares=False, sabotage=untie)


Q = "model.layers.0.self_attn.q_proj.weight"
OTHER_Q = "model.layers.1.self_attn.q_proj.weight"


async def skip(engine, update, weights, version):
    """Answers for the new version, but keeps the old weights."""
    return await update(list(engine.core.model.named_weights()), version)


async def in_engine(engine, update, weights, version, fault):
    """Takes the weights over; then `fault` changes the engine's own memory, and it answers for what it holds."""
    take_over = engine_module.copy_weights

    def copy_and_spoil(own, wire):
        before = {name: tensor.clone() for name, tensor in own.items()}
        arrived = take_over(own, wire)
        with torch.no_grad():
            fault(own, before)
        return arrived

    engine_module.copy_weights = copy_and_spoil
    try:
        return await update(weights, version)
    finally:
        engine_module.copy_weights = take_over


def one_element(own, before):
    own[Q].view(-1)[5] += 1e-6


def swapped(own, before):
    own[Q].data, own[OTHER_Q].data = own[OTHER_Q].data, own[Q].data


def skipped(own, before):
    for name, tensor in own.items():
        tensor.copy_(before[name])


def one_skipped(own, before):
    own[OTHER_Q].copy_(before[OTHER_Q])


def applied_twice(own, before):
    """As a transport of differences would, if it added one twice."""
    own[Q].add_(own[Q] - before[Q])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (one_element, f"holds other weights than the trainer's: {Q}$"),
        (swapped, f"other weights than the trainer's: {Q} and {OTHER_Q} are swapped$"),
        (skipped, "holds other weights than the trainer's: .* and [0-9]+ more$"),
        (one_skipped, f"holds other weights than the trainer's: {OTHER_Q}$"),
        (applied_twice, f"holds other weights than the trainer's: {Q}$"),
    ],
)
def test_a_fault_in_the_engines_memory_stops_the_run_and_is_named(fault, words):
    async def sabotage(engine, update, weights, version):
        return await in_engine(engine, update, weights, version, fault)

    with pytest.raises(SyncError, match=words):
        publish(model(0), model(1), shares=False, sabotage=sabotage)


def test_a_probe_that_is_nan_in_its_middle_is_no_proof():
    async def sabotage(engine, update, weights, version):
        score = engine.score

        async def spoiled(*asked):
            first, _, *rest = (await score(*asked)).logprobs
            return Scored((first, float("nan"), *rest))

        engine.score = spoiled
        return await update(weights, version)

    with pytest.raises(SyncError, match="scores the probe nan nats away"):
        publish(model(0), model(1), shares=False, sabotage=sabotage)


def test_weights_that_were_changed_on_the_way_are_named():
    async def flip_one(engine, update, weights, version):
        weights = [(name, tensor.detach().clone()) for name, tensor in weights]
        dict(weights)[Q].view(-1)[5] += 1e-3
        return await update(weights, version)

    with pytest.raises(SyncError, match=f"received other weights than the trainer's: {Q}$"):
        publish(model(0), model(1), shares=False, sabotage=flip_one)


def test_an_update_that_is_skipped_as_a_whole_stops_the_run():
    with pytest.raises(SyncError, match="received other weights"):
        publish(model(0), model(1), shares=False, sabotage=skip)


async def keep_version(engine, update, weights, version):
    """Takes the weights, but stays at its version."""
    return await update(weights, version - 1)


async def twice(engine, update, weights, version):
    """The same version is handed over again."""
    await update(weights, version)
    return await update(weights, version)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    ("sabotage", "words"),
    [(keep_version, "answers version 0 to the publication"), (twice, "refused the weights: the engine holds version 1 already")],
)
def test_an_engine_at_another_version_stops_the_run(shares, sabotage, words):
    trainer = model(0)
    with pytest.raises(SyncError, match=words):
        publish(trainer, trainer if shares else model(1), shares=shares, sabotage=sabotage)


def test_an_engine_that_decodes_wrongly_stops_the_run():
    """Its digest is right, but its cached decode path does not compute what the trainer computes."""
    trainer = model()

    async def bend(engine, update, weights, version):
        receipt = await update(weights, version)
        score = engine.core.score
        engine.core.score = lambda *asked: Scored(tuple(x + 0.01 for x in score(*asked).logprobs))
        return receipt

    with pytest.raises(SyncError, match="nats away from the trainer"):
        publish(trainer, trainer, shares=True, sabotage=bend)


@pytest.mark.parametrize(
    ("dtype", "words"), [("float32", "diverged$"), ("float16", r"diverged, or float16 is too narrow .* \(model\.dtype\)")]
)
def test_weights_that_have_diverged_are_not_blamed_on_the_engine(dtype, words):
    trainer = model(dtype=dtype)
    with torch.no_grad():
        dict(trainer.named_weights())["lm_head.weight"][0, 0] = float("nan")
    with pytest.raises(NonFinite, match=f"training has {words}"):
        publish(trainer, trainer, shares=True)


PROMPT = tuple(range(10, 30))


async def ask(engine, name, prompt=PROMPT):
    """One token after a prompt, whose cache stays for siblings."""
    request = Request(name, prompt, SamplingParams(1, 1.0), name)
    return [token async for chunk in engine.generate(request) for token in chunk.tokens]


def keep_the_cache(engine):
    """Make the engine's cache survive the next update."""
    engine.core.scheduler.pool.forget = lambda: None


def remember(engine):
    """Keep what is cached now from being handed out; returns what brings it back, findable as if it were of the present weights."""
    pool = engine.core.scheduler.pool
    index, blocks = pool.index, list(pool._idle)
    for block in blocks:
        pool.hold(block)
    kept = index.root, dict(index._full), dict(index._contents), {before: dict(nexts) for before, nexts in index._next.items()}

    def bring_back(as_present):
        root, index._full, index._contents, index._next = kept
        if as_present:
            index.root = root
        for block in blocks:
            pool.drop(block)

    return bring_back


def with_engine(play, *, compiled=True):
    """Run `play(engine, publisher)` over shared weights."""
    config = EmbeddedConfig(cache_tokens=256, compiled=compiled)

    async def main():
        with ThreadPoolExecutor(1) as thread:
            trainer = model()
            engine = EmbeddedEngine(trainer, config, thread, shares_weights=True, deterministic=False)
            publisher = EnginePublisher(TorchBackend(trainer, TrainConfig(), None), trainer, engine, thread)
            try:
                async with asyncio.timeout(60):
                    await play(engine, publisher)
            finally:
                await engine.close()

    asyncio.run(main())


def test_nothing_is_sampled_between_an_update_and_its_proof():
    async def play(engine, publisher):
        stream = engine.generate(Request("a", PROMPT, SamplingParams(200, 1.0), "a", chunk_tokens=1))
        await anext(stream)
        compare, during = publisher._compare_probe, []

        async def slowly(version):
            during.append(engine._calls["a"].sequence.num_sampled)
            await asyncio.sleep(0.1)
            during.append(engine._calls["a"].sequence.num_sampled)
            return await compare(version)

        publisher._compare_probe = slowly
        times = (await publisher.publish(1)).times
        assert during[0] == during[1] < 200 and times.pause_s >= times.prove_s >= 0.1
        while engine._calls["a"].sequence.num_sampled == during[0]:
            await anext(stream)
        await engine.pause()
        await publisher.publish(2)
        assert engine.paused, "whoever had it pause has it go on"
        await engine.resume()
        score, engine.core.score = engine.core.score, lambda *asked: Scored((0.5,) * (len(asked[0]) - 1))
        with pytest.raises(SyncError, match="nats away from the trainer"):
            await publisher.publish(3)
        sampled = engine._calls["a"].sequence.num_sampled
        await asyncio.sleep(0.1)
        assert engine._calls["a"].sequence.num_sampled == sampled < 200
        engine.core.score = score
        await publisher.publish(4)
        assert not engine.paused, "it had it pause itself"
        await stream.aclose()

    with_engine(play)


@pytest.mark.parametrize("error", [EngineLost("engine copy 1 died"), EngineFailed("it is torn"), TransportError("cut")])
def test_whatever_an_engine_fails_with_is_told_as_what_is_promised(error):
    async def fails(*_):
        raise error

    with pytest.raises(SyncError, match=str(error)):
        publish(model(0), model(1), shares=False, sabotage=fails)


def test_a_block_that_outlives_an_update_stops_the_run():
    async def play(engine, publisher):
        await publisher.publish(1)
        assert len(await ask(engine, "a")) == 1
        assert engine.core.scheduler.num_cached_tokens == len(PROMPT)
        keep_the_cache(engine)
        with pytest.raises(SyncError, match="20 tokens cached from older weights"):
            await publisher.publish(2)

    with_engine(play)


def test_rows_for_decoding_that_outlive_an_update_stop_the_run():
    """What lies side by side for the next decode step is a cache like the blocks, and the receipt counts it."""

    async def play(engine, publisher):
        await publisher.publish(1)
        stream = engine.generate(Request("a", PROMPT, SamplingParams(40, 1.0), "a", chunk_tokens=1))
        assert len((await anext(stream)).tokens) == 1
        while engine.core.rows.num_tokens < len(PROMPT) + 2:
            await asyncio.sleep(0)
        engine.core.rows.clear = lambda: None
        with pytest.raises(SyncError, match=r"still has 2\d tokens cached from older weights"):
            await publisher.publish(2)
        await stream.aclose()

    with_engine(play, compiled=False)


@pytest.mark.parametrize("which", ["keys", "values"])
def test_the_probe_reads_the_rows_that_decoding_reads(which, monkeypatch):
    """A fault in the rows alone, the blocks as they should be, shows in the probe."""
    take = rows_module.RowIndices.take

    def wrong(self, *args):
        keys, values = take(self, *args)
        return (keys + 0.1 * torch.randn_like(keys), values) if which == "keys" else (keys, values * 1.2)

    async def play(engine, publisher):
        await publisher.publish(1)
        monkeypatch.setattr(rows_module.RowIndices, "take", wrong)
        with pytest.raises(SyncError, match=r"scores the probe .* nats away"):
            await publisher.publish(2)

    with_engine(play, compiled=False)


def test_the_probe_goes_through_the_compiled_step(monkeypatch):
    """A fault in that step alone shows in the probe."""
    hidden = NativeDecode.hidden

    async def play(engine, publisher):
        await publisher.publish(1)
        if engine.core._native is None:
            pytest.skip("there is no C compiler")
        monkeypatch.setattr(NativeDecode, "hidden", lambda *asked: 1.2 * hidden(*asked))
        with pytest.raises(SyncError, match=r"scores the probe .* nats away"):
            await publisher.publish(2)

    with_engine(play)


@pytest.mark.parametrize("num_prompt", [7, 10, 16, 17, 20])
def test_a_block_that_comes_back_after_an_update_is_never_sampled_from(num_prompt):
    """The engine's receipt was clean; what older weights cached turns up again only afterwards. A block that is partly filled is copied
    before it is written, and the copy must not pass for new."""
    prompt = PROMPT[:num_prompt]

    async def play(engine, publisher):
        await publisher.publish(1)
        await ask(engine, "a", prompt)
        bring_back = remember(engine)
        await publisher.publish(2)
        bring_back(as_present=True)
        with pytest.raises(EngineFailed, match="holds keys and values of the weights of 1 update"):
            await ask(engine, "b", prompt)
        assert len(await ask(engine, "c", prompt)) == 1, "the stale cache is forgotten with the failure"

    with_engine(play)


def test_what_older_weights_cached_is_not_found():
    """The chain of hashes begins with the weights' epoch: even a cache that was kept by mistake is of no use to a newer version."""

    async def play(engine, publisher):
        await publisher.publish(1)
        await ask(engine, "a")
        bring_back = remember(engine)
        await publisher.publish(2)
        bring_back(as_present=False)
        computed = engine.core.num_computed
        await ask(engine, "b")
        assert engine.core.num_computed == computed + len(PROMPT)

    with_engine(play)


def test_caches_of_the_present_weights_are_used():
    async def play(engine, publisher):
        await publisher.publish(1)
        await ask(engine, "a")
        computed = engine.core.num_computed
        await ask(engine, "b")
        assert engine.core.num_computed == computed + 1, "the prompt's last token alone"

    with_engine(play)
