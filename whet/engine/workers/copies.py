"""Copies of the embedded engine in processes of their own, which share one set of weights: sampling on more cores or devices."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from whet.engine.base import SCORE_TOLERANCE, EngineFailed, EngineLost
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.runner import CLOSED
from whet.engine.embedded.tensor_parallel import check_split
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Have, NotYet, Slot, Tell
from whet.engine.pool.pool import EnginePool, breaker_of, to_errors
from whet.engine.workers.launch import Launcher, LocalLauncher
from whet.engine.workers.processes import CopyProcess
from whet.engine.workers.setup import Setup
from whet.model.causal import CausalModel
from whet.model.shared import SharedModel, share
from whet.transport.base import Sender, SentOnce, Stream, Ticket, TransportError
from whet.transport.carry import carry
from whet.transport.land import whole_set
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig, Syncing
from whet.types import Receipt


class EngineCopies(EnginePool[CopyProcess]):
    """A pool of embedded engines.

    Args:
        model: its tensors are moved into memory that the copies share, so no other object may use them.
            In the CPU's memory.
        config: sizes of each copy, and the number of copies.
        devices: device of each copy, or of each rank of the first copy, then of the next.
        deterministic: as for the embedded engine; conversations go to copies in the order in which they
            are opened.
        tokenizer: folder of a tokenizer to find stop texts with.
        trust_remote_code: allow code that comes with the tokenizer to run.
        launcher: starts the copies' processes; None: on this machine.
        sync: transfer of new weights to the copies; None: through memory.
        pool: supervision of the copies.
        tell: called for each copy that is lost.

    Raises:
        EngineFailed: if a copy does not start.
        ValueError: if the model cannot be cut over the ranks of a copy.
    """

    def __init__(
        self,
        model: CausalModel,
        config: EmbeddedConfig,
        devices: Sequence[str],
        *,
        deterministic: bool,
        tokenizer: Path | None = None,
        trust_remote_code: bool = False,
        launcher: Launcher | None = None,
        sync: Syncing | None = None,
        pool: PoolConfig | None = None,
        tell: Tell = to_errors,
    ) -> None:
        ranks, pool, sync = config.tensor_parallel, pool or PoolConfig(), sync or Syncing(SyncConfig(), Path())
        if ranks > 1:
            check_split(model, ranks)
        threads = max(1, torch.get_num_threads() // len(devices))
        shapes = dict(model.named_weights())
        launcher = launcher or LocalLauncher()
        self._memory = KeptMemory(share(model))
        self._meeting = Path(tempfile.mkdtemp(prefix="whet-ranks-"))
        setup = Setup(
            self._memory.shared,
            config,
            devices[0],
            deterministic,
            threads,
            tokenizer,
            trust_remote_code,
            mapped=sync.config.is_mapped,
            keeps_weights=sync.config.transport == "delta",
        )
        starts = [
            Starter(
                f"engine copy {i}",
                setup,
                devices[i * ranks : (i + 1) * ranks],
                launcher,
                self._meeting / str(i),
                pool.start_timeout_s,
            )
            for i in range(len(devices) // ranks)
        ]
        try:
            self._sender = sender_of(sync.config, model, sync.folder, launcher.address)
            copies = start_all(starts)
        except BaseException:
            self._let_go()
            raise
        slots = [Slot(copy.name, start, copy, breaker_of(pool)) for copy, start in zip(copies, starts, strict=True)]
        tolerance = 0.0 if deterministic else SCORE_TOLERANCE[model.dtype]  # machines may round otherwise, where no bits are promised
        super().__init__(slots, SentWeights(self._sender, shapes), pool, deterministic=deterministic, tell=tell, tolerance=tolerance)

    def end(self) -> None:
        self._sender.close()
        super().end()
        self._let_go()

    def _let_go(self) -> None:
        self._memory.let_go()
        shutil.rmtree(self._meeting, ignore_errors=True)


class Starter:
    """Starts a copy, again and again. Its `__call__` may run in any thread.

    Args:
        name: name of the copy.
        setup: setup of its first rank.
        devices: devices of its ranks.
        launcher: launcher of their processes.
        meeting: place where the ranks meet, a file for each start.
        timeout_s: for the copy to be ready.
    """

    def __init__(self, name: str, setup: Setup, devices: Sequence[str], launcher: Launcher, meeting: Path, timeout_s: float) -> None:
        self._name, self._setup, self._devices, self._launcher = name, setup, devices, launcher
        self._meeting, self._timeout_s = meeting, timeout_s
        self._starts = itertools.count(1)

    def __call__(self, given_up: threading.Event) -> CopyProcess:
        number = next(self._starts)
        setup = replace(self._setup, name=self._name if number == 1 else f"{self._name}, start {number}")
        copy = CopyProcess(self._name, setup, self._devices, Path(f"{self._meeting}-{number}"), self._launcher, given_up)
        copy.ready(given_up, self._timeout_s)
        if given_up.is_set():
            copy.end()
            raise EngineFailed(f"{self._name}: {CLOSED}")
        return copy


def start_all(starts: Sequence[Starter]) -> list[CopyProcess]:
    """All at once; when one does not start the others are ended.

    Raises:
        EngineFailed: error of the first that does not start.
    """
    given_up = threading.Event()
    with ThreadPoolExecutor(len(starts), "start") as threads:
        starting = [threads.submit(start, given_up) for start in starts]
        try:
            return [each.result() for each in starting]
        except BaseException:
            given_up.set()
            for each in starting:
                if each.exception() is None:
                    each.result().end()
            raise


class KeptMemory:
    """A model's shared file, for copies that start later, too. On Linux it loses its name: nobody else finds it, it is gone with this
    process whatever ends that, and copies attach to it by this process's descriptor. Elsewhere it keeps its name until the end.

    Args:
        shared: model of the file.
    """

    def __init__(self, shared: SharedModel) -> None:
        self.shared, self._named = shared, shared.path
        self._descriptor: int | None = None
        descriptors = Path(f"/proc/{os.getpid()}/fd")
        if descriptors.is_dir():
            self._descriptor = os.open(shared.path, os.O_RDWR)
            shared.path.unlink()
            self.shared = replace(shared, path=descriptors / str(self._descriptor))

    def let_go(self) -> None:
        self._named.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SentWeights:
    """New weights reach the copies by a transport, and each copy answers for what it then holds.

    A copy that is lost meanwhile is left out, unless all take part in one exchange: then the version does not arrive.

    Args:
        sender: the trainer's end.
        shapes: the copies' weights by name, looked at for their shapes.
    """

    def __init__(self, sender: Sender, shapes: Mapping[str, Tensor]) -> None:
        self._sender, self._shapes = sender, shapes

    async def spread(
        self, weights: Iterable[tuple[str, Tensor]], version: int, members: Mapping[str, CopyProcess], have: Have
    ) -> Receipt | None:
        if not isinstance(weights, Stream):
            weights = whole_set(self._shapes, weights)

        async def load(name: str, ticket: Ticket) -> Receipt | None:
            try:
                receipt = await have(name, lambda copy: copy.call("begin", version, ticket), by_itself=not self._sender.simultaneous)
            except EngineLost:
                if self._sender.simultaneous:
                    raise
                return None
            return replace(receipt, engine=name)

        loads = {name: partial(load, name) for name in members}
        try:
            carried = await carry(self._sender, weights, version, loads, [name for copy in members.values() for name in copy.processes])
        except ValueError as refused:
            raise TransportError(f"version {version}: the engine refused the weights: {refused}") from refused
        answers = carried.receipts
        if not answers:
            return None
        return replace(
            answers[0],
            engine="the engine",
            members=tuple(answers),
            num_stale_tokens=sum(answer.num_stale_tokens for answer in answers),
            wire_bytes=carried.sent.size_bytes,
            encode_s=carried.sent.encode_s,
            wire_s=carried.sent.wire_s,
            load_s=max(answer.load_s for answer in answers),
        )

    async def catch_up(self, member: CopyProcess, version: int) -> Receipt:
        try:
            ticket = await asyncio.to_thread(self._sender.whole, version)
        except SentOnce as gone:
            raise NotYet(f"{gone} (sync.transport)") from gone
        return await member.call("begin", version, ticket)
