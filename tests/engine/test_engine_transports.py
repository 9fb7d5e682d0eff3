"""Copies of the engine that get their weights by each transport: proven at every version, and nothing is sampled after a fault."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.engine.engine_setup import CONFIGS, engine_of, reply_to
from whet.engine.base import EngineFailed
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.pool.config import PoolConfig
from whet.engine.publish import EnginePublisher, SyncError
from whet.engine.workers.copies import EngineCopies
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport import delta
from whet.transport.base import Stream
from whet.transport.settings import SyncConfig, Syncing
from whet.types import Request, SamplingParams

VERSIONS = itertools.count(1)
SIZES = {"cache_tokens": 1024, "block_size": 4}


def model(seed=0):
    return random_causal(CONFIGS["small"](), ModelConfig(path="", dtype="float64", device="cpu"), seed=seed)


def copies_of(transport, folder, *, ranks=1, timeout_s=60.0, pool=None):
    sizes = EmbeddedConfig(copies=2 // ranks, tensor_parallel=ranks, **SIZES)
    sync = Syncing(SyncConfig(transport=transport, timeout_s=timeout_s), folder)
    return EngineCopies(model(), sizes, deterministic=False, sync=sync, pool=pool or PoolConfig(restarts=0))


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """One of each kind, made when it is first asked for."""
    made = {}

    def engine(transport, ranks=1):
        if (transport, ranks) not in made:
            made[transport, ranks] = copies_of(transport, tmp_path_factory.mktemp(transport), ranks=ranks)
        return made[transport, ranks]

    yield engine
    for found in made.values():
        found.end()


async def publish(engine, trainer, version=None):
    with ThreadPoolExecutor(1) as thread:
        publisher = EnginePublisher(TorchBackend(trainer, TrainConfig(), None), trainer, engine, thread)
        return await publisher.publish(next(VERSIONS) if version is None else version)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "ranks"),
    [
        ("delta", 1),
        ("broadcast", 2),
        ("ipc", 1),
        slow("ipc", 2),
        slow("disk", 1),
        slow("broadcast", 1),
        slow("delta", 2),
        slow("disk", 2),
    ],
)
def test_every_copy_holds_each_version_and_samples_from_it(engines, transport, ranks):
    engine, trainer = engines(transport, ranks), model(5)
    asked = [Request(f"r{i}", (3 + i, 5, 7), SamplingParams(8, 1.0, seed=i)) for i in range(6)]

    async def replies(found):
        return [(await reply_to(found, request)).tokens for request in asked]

    async def main():
        out = []
        for turn in range(3):
            with torch.no_grad():
                next(trainer.hf.parameters()).add_(1e-3)
            if turn == 1:
                await engine.sleep()
            published = await publish(engine, trainer)
            assert len(published.receipt.members) == 2 // ranks
            assert all(digests_of(trainer.named_state()) == member.resident for member in published.receipt.members)
            metrics = {name: metric.value for name, metric in published.metrics().items()}
            assert metrics["sync/bytes"] > 0 and metrics["sync/pause_s"] >= metrics["sync/wire_s"] > 0 < metrics["sync/load_s"]
            out.append(await replies(engine))
        return out[-1]

    alone = engine_of(trainer, **SIZES)

    async def one():
        try:
            return await replies(alone)
        finally:
            await alone.close()

    assert asyncio.run(main()) == asyncio.run(one())


@pytest.mark.long
@pytest.mark.parametrize("transport", ["broadcast", slow("shared"), slow("ipc"), slow("disk"), slow("delta")])
def test_a_slow_copy_is_named_at_the_deadline_and_nothing_is_sampled(transport, tmp_path):
    shorter = {"update_timeout_s": 1.0} if transport == "broadcast" else {}  # who waits for another is not late
    engine = copies_of(transport, tmp_path, timeout_s=3.0, pool=PoolConfig(restarts=0, **shorter))
    stopped = engine.members[1]._links[0].process.child.pid
    update = type(engine.members[1]).update

    async def stop_then(self, ticket, version):
        if self is engine.members[1]:
            os.kill(stopped, signal.SIGSTOP)
        return await update(self, ticket, version)

    async def main():
        await publish(engine, model(1), 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(engine.members[1]), "update", stop_then)
            began = time.monotonic()
            with pytest.raises(SyncError, match=r"version 2: .*engine copy 1"):
                await publish(engine, model(2), 2)
            assert time.monotonic() - began < 20
        assert len(engine.members) == 2, "the other one lives on"
        os.kill(stopped, signal.SIGCONT)
        assert engine.version == 1
        with pytest.raises(EngineFailed, match="half of version 2"):
            await engine.resume()
        sampled = asyncio.ensure_future(reply_to(engine, Request("x", (1, 2), SamplingParams(2))))
        await asyncio.sleep(0.3)
        await engine.close()
        with pytest.raises(EngineFailed):
            await sampled

    try:
        asyncio.run(main())
    finally:
        engine.end()


@pytest.mark.long
def test_a_copy_that_dies_while_all_take_part_in_a_broadcast_is_named(tmp_path):
    engine = copies_of("broadcast", tmp_path)
    trainer = model(1)

    def dying():
        """Kill the second copy when half of the weights have been read."""
        weights = list(trainer.named_weights())
        for i, found in enumerate(weights):
            if i == len(weights) // 2:
                os.kill(engine.members[1]._links[0].process.child.pid, signal.SIGKILL)
                time.sleep(0.5)
            yield found

    async def main():
        with pytest.raises(EngineFailed, match=r"engine copy 1 died \(killed by signal 9\)"):
            await engine.update(Stream(dying()), 1)
        with pytest.raises(EngineFailed, match="half of version 1"):
            await engine.resume()
        assert engine.version == 0

    try:
        asyncio.run(main())
    finally:
        engine.end()


@pytest.mark.long
def test_what_is_changed_on_its_way_is_named(tmp_path):
    """No checksum of the transport's own tells: the file holds what was written, and it is the wrong thing."""
    engine, trainer = copies_of("delta", tmp_path), model(6)
    real = delta.change_of

    def spoiled(old, new):
        wrong = new.clone()
        wrong.view(-1)[0] += 1e-9
        return real(old, wrong)

    async def main():
        await publish(engine, trainer, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta, "change_of", spoiled)
            with pytest.raises(SyncError, match=r"engine copy 0 received other weights than the trainer's: .* more$"):
                await publish(engine, trainer, 2)

    try:
        asyncio.run(main())
    finally:
        engine.end()
