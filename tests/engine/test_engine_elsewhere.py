"""A copy on another machine than the weights: it maps no memory of theirs, begins with a copy that came over its own connection, and gets
every version by the transport. Another machine is what its process says of itself.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.engine.engine_setup import CONFIGS, DEADLINE_S, DIALS, elsewhere, engine_of, reply_to
from whet.engine.base import EngineFailed
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.pool.config import Supervision
from whet.engine.pool.member import State
from whet.engine.publish import EnginePublisher
from whet.engine.workers import first_weights
from whet.engine.workers.copies import EngineCopies
from whet.engine.workers.dialing import DialingLauncher
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.model.shared import attach, share
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.settings import SyncConfig, Syncing
from whet.types import Request, SamplingParams

SIZES = EmbeddedConfig(cache_tokens=1024, block_size=4, copies=2)
FAR = "engine copy 1"
MAPS_NOTHING = f"from whet.engine.workers import first_weights, worker; worker.attach = None; first_weights.PIECE_BYTES = 1000; {DIALS}"
ASKED = [Request(f"r{i}", (3 + i, 5, 7), SamplingParams(8, 1.0, seed=i)) for i in range(6)]


def model(seed=0):
    return random_causal(CONFIGS["small"](), ModelConfig(path="", dtype="float64", device="cpu"), seed=seed)


def copies_of(transport, folder):
    """Two copies, the second far away; this machine's address is another one than usual, too."""

    def begin(name, invitation, given_up):
        assert invitation.host == "127.0.0.2"
        if name != FAR:
            return elsewhere(name, invitation)
        process = elsewhere(name, invitation, MAPS_NOTHING)
        process.host = "far"
        return process

    return EngineCopies(
        model(),
        SIZES,
        deterministic=False,
        sync=Syncing(SyncConfig(transport=transport, timeout_s=60.0), folder),
        launcher=DialingLauncher(begin, "127.0.0.2"),
        pool=Supervision(restart_backoff_s=0.01, health_every_s=0.2),
    )


async def replies(engine):
    return [(await reply_to(engine, request)).tokens for request in ASKED]


async def alone(trainer):
    engine = engine_of(trainer, cache_tokens=1024)
    try:
        return await replies(engine)
    finally:
        await engine.close()


@pytest.mark.long
@pytest.mark.parametrize("transport", ["broadcast", *(pytest.param(each, marks=pytest.mark.slow) for each in ("disk", "delta"))])
def test_it_begins_with_the_first_weights_gets_every_version_and_comes_back(transport, tmp_path):
    engine, trainer = copies_of(transport, tmp_path / "versions"), model(5)

    async def publish(version):
        with torch.no_grad():
            next(trainer.hf.parameters()).add_(1e-3)
        with ThreadPoolExecutor(1) as thread:
            published = await EnginePublisher(TorchBackend(trainer, TrainConfig(), None), trainer, engine, thread).publish(version)
        assert [member.engine for member in published.receipt.members] == ["engine copy 0", FAR]
        assert all(digests_of(trainer.named_state()) == member.resident for member in published.receipt.members)

    async def play():
        assert await replies(engine) == await alone(model())
        await publish(1)
        await publish(2)
        assert await replies(engine) == await alone(trainer)
        engine.slots[1].member._links[0].process.kill()
        back = State.BEHIND if transport == "broadcast" else State.SERVING
        while engine._supervisor.num_restarts < 1 or engine.slots[1].state is not back:
            await replies(engine)
        await publish(3)
        assert engine.slots[1].state is State.SERVING and await replies(engine) == await alone(trainer)

    try:
        asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    finally:
        engine.end()


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_memory_cannot_be_shared_with_another_machine(transport, tmp_path):
    with pytest.raises(EngineFailed, match=r"engine copy 1 was placed on far, .* set sync\.transport to broadcast, delta or disk, or give"):
        copies_of(transport, tmp_path)


@pytest.mark.long
def test_first_weights_that_were_changed_on_their_way_are_named(tmp_path, monkeypatch):
    piece = first_weights.FirstWeights.piece

    def spoiled(self, *asked):
        data = bytearray(piece(self, *asked))
        data[0] ^= 1
        return bytes(data)

    monkeypatch.setattr(first_weights.FirstWeights, "piece", spoiled)
    with pytest.raises(EngineFailed, match=r"engine copy 1 began with other weights than it was sent: (lm_head|model)\."):
        copies_of("broadcast", tmp_path)


def test_memory_that_is_not_there_is_not_made(tmp_path):
    shared = share(model())
    shared.path.unlink()
    gone = replace(shared, path=tmp_path / "weights")
    with pytest.raises(FileNotFoundError):
        attach(gone)
    assert not gone.path.exists(), "an engine of zeros"
