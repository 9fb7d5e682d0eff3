"""A version of weights by each transport to a process on the same device; an engine's memory before sleep, asleep and awake again.

GB/s are bytes of tensors, whatever travels, by the seconds from a version's announcement until the other process has it in tensors of its
own; `shared` ends where it may read the common ones, which are in the host's memory. That what is carried arrives to the bit is for
the tests.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import weight_sync

from gpu.clock import forget, free_gib, once
from gpu.models import made, weight_bytes
from gpu.record import Case
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.model.causal import CausalModel
from whet.model.digest import digests_of
from whet.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    carried: str
    """Of `weight_sync.SHAPES`."""
    sleeper: str
    """Of `gpu.models.SHAPES`."""
    cache_tokens: int


SIZES = {"small": Sizes("2M", "tiny", 512), "full": Sizes("110M", "0.6B", 65_536)}
START_S = 30.0


class Peer:
    """The other process; one that ended is started anew."""

    def __init__(self, size: str, device: torch.device) -> None:
        self._size, self._device = size, str(device)
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._ready = False
        self._models: tuple[CausalModel, CausalModel] | None = None

    def models(self) -> tuple[CausalModel, CausalModel]:
        """The one whose weights are sent, and one in the host's memory, whose tensors are shared where the transport is."""
        if self._models is None:
            self._models = weight_sync.model(self._size, self._device), weight_sync.model(self._size)
        return self._models

    def start(self) -> None:
        """Begin to start it; `connection` waits for it."""
        spawned = multiprocessing.get_context("spawn")
        self._connection, theirs = spawned.Pipe()
        self._process = spawned.Process(target=weight_sync.receive, args=(theirs, self._size, self._device), daemon=True)
        self._process.start()
        self._ready = False

    def connection(self) -> Connection:
        if self._process is None or not self._process.is_alive():
            self.start()
        assert self._connection is not None
        if not self._ready:
            if not self._connection.poll(START_S):
                raise TimeoutError(f"the other process did not start in {START_S:.0f} s")
            assert self._connection.recv() == "ready"
            self._ready = True
        return self._connection

    def end(self) -> None:
        """After a fault: nobody knows what it still waits for."""
        if self._process is not None:
            self._process.kill()
            self._process.join(5.0)
            self._process = None


def cases(sizes: str, device: torch.device) -> list[Case]:
    has = SIZES[sizes]
    peer = Peer(has.carried, device)
    peer.start()
    weight_sync.TIMEOUT_S = 8
    carried = [Case(name, lambda name=name: by(name, peer)) for name in weight_sync.TRANSPORTS]
    return [
        Case("digests", lambda: digests(has.carried, device)),
        *carried,
        Case("sleep and wake", lambda: slept(has, device)),
    ]


def by(transport: str, peer: Peer) -> Mapping[str, Any]:
    """Some versions by one transport."""
    try:
        connection, (trained, engines) = peer.connection(), peer.models()
        seconds, sent = weight_sync.versions_by(transport, trained, engines, connection)
    except BaseException:
        peer.end()
        raise
    num_bytes, took = weight_bytes(trained), median(seconds[1:])
    return {
        "first_s": round(seconds[0], 4), "seconds": round(took, 4), "gb_per_s": round(num_bytes / took / 1e9, 3),
        "gb": round(num_bytes / 1e9, 4), "mb_sent": round(sent / 1e6, 3),
    }  # fmt: skip


def digests(size: str, device: torch.device) -> Mapping[str, Any]:
    """Seconds of the digests of all weights, and whether those of the CPU are the same."""
    trained = weight_sync.model(size, str(device))
    digests_of(trained.named_weights())
    took = once(lambda: digests_of(trained.named_weights()), device)
    assert digests_of(trained.named_weights()) == digests_of((name, tensor.cpu()) for name, tensor in trained.named_weights())
    return {"seconds": round(took, 4), "gb_per_s": round(weight_bytes(trained) / took / 1e9, 3)}


def slept(has: Sizes, device: torch.device) -> Mapping[str, Any]:
    """An engine with weights of its own gives its memory back, has it again, and samples what it sampled before."""
    forget(device)
    found: dict[str, Any] = {"free_gib_without": free_gib(device)}
    model = made(has.sleeper, device)
    kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.named_weights()}
    sizes = EmbeddedConfig(cache_tokens=has.cache_tokens, block_size=16, max_running=4, max_batch_tokens=2048, compiled=False)
    core = EngineCore(model, sizes)
    before = sampled(core)
    found |= {"free_gib_before": free_gib(device), "cache_gib": round(core.store.size_bytes / 2**30, 3), "weights_gib": held_gib(model)}
    found["sleep_s"] = round(once(lambda: core.sleep(weights=True), device), 4)
    found |= {"free_gib_asleep": free_gib(device), "weights_gib_asleep": held_gib(model)}

    def wake() -> None:
        core.wake()
        with torch.no_grad():
            for name, tensor in model.named_weights():
                tensor.copy_(kept[name])
        core.begin_version(1)

    found["wake_and_copy_s"] = round(once(wake, device), 4)
    after = sampled(core)
    assert after == before, "it samples other tokens after sleep, with the same weights"
    return found | {"free_gib_after": free_gib(device), "weights_gib_after": held_gib(model)}


def sampled(core: EngineCore) -> list[int]:
    """A few tokens."""
    sequence = core.add(Request("r", tuple(range(3, 40)), SamplingParams(8, 1.0, seed=3)))
    while sequence.num_sampled < 4:
        core.step()
    core.finish(sequence)
    return sequence.tokens


def held_gib(model: CausalModel) -> float:
    """Memory behind the weights."""
    storages = {id(model): 0} | {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for _, tensor in model.named_weights())}
    return round(sum(storages.values()) / 2**30, 5)
