"""A version counts only when the engine proves that it holds the trainer's weights."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import Qwen3Config

from whet.engine.embedded.engine import EmbeddedConfig, EmbeddedEngine
from whet.model.causal import ModelConfig, random_causal
from whet.sync.base import SyncError
from whet.sync.shared import SharedPublisher
from whet.train.torch_native.backend import TorchBackend, TrainConfig

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


def model(seed: int = 0):
    return random_causal(SHAPE, ModelConfig(path="", device="cpu"), seed=seed)


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
                return await SharedPublisher(backend, trainer, engine, thread).publish(version), engine.version
            finally:
                await engine.close()

    return asyncio.run(main())


def test_shared_weights_are_proven_without_moving():
    trainer = model()
    receipt, version = publish(trainer, trainer, shares=True, version=7)
    assert receipt.version == version == 7
    assert receipt.wire_digest == receipt.resident_digest


def test_a_copy_arrives_whole():
    trainer, other = model(0), model(1)
    publish(trainer, other, shares=False)
    for (name, mine), (_, theirs) in zip(trainer.named_weights(), other.named_weights(), strict=True):
        assert torch.equal(mine, theirs), name


async def skip(engine, update, weights, version):
    """Answers for the new version, but keeps the old weights."""
    own = [(name, tensor) for name, tensor in engine.core.model.named_weights()]
    return await update(own, version)


async def flip_one(engine, update, weights, version):
    """One element differs in the engine's memory before it answers."""
    weights = [(name, tensor.clone()) for name, tensor in weights]
    weights[3][1].data.view(-1)[5] += 1e-3
    return await update(weights, version)


async def keep_version(engine, update, weights, version):
    """Takes the weights, but stays at its version."""
    return await update(weights, version - 1)


@pytest.mark.parametrize(
    ("sabotage", "words"), [(skip, "digest"), (flip_one, "digest"), (keep_version, "answers version 0 to the publication")]
)
def test_an_engine_that_holds_something_else_stops_the_run(sabotage, words):
    with pytest.raises(SyncError, match=words):
        publish(model(0), model(1), shares=False, sabotage=sabotage)


def test_an_engine_that_decodes_wrongly_stops_the_run():
    """Its digest is right, but its cached decode path does not compute what the trainer computes."""
    trainer = model()

    async def bend(engine, update, weights, version):
        receipt = await update(weights, version)
        score = engine.core.score
        engine.core.score = lambda tokens, temperature: [x + 0.01 for x in score(tokens, temperature)]
        return receipt

    with pytest.raises(SyncError, match="nats away from the trainer"):
        publish(trainer, trainer, shares=True, sabotage=bend)
