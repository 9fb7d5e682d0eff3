"""Copies of the embedded engine in processes of their own, which share one set of weights: sampling on more cores or devices."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from whet.engine.base import SCORE_TOLERANCE, EngineFailed
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.runner import CLOSED
from whet.engine.embedded.tensor_parallel import check_split
from whet.engine.embedded.tokenizer import TokenizerFolder
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import OnIncident, Slot
from whet.engine.pool.pool import EnginePool, breaker_of, print_incident
from whet.engine.pool.weights import WeightSync
from whet.engine.workers.launch import Launcher, LocalLauncher
from whet.engine.workers.processes import CopyProcess
from whet.engine.workers.setup import Setup
from whet.model.causal import CausalModel
from whet.model.shared import SharedModel, share
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig, Syncing


class EngineCopies(EnginePool[CopyProcess]):
    """A pool of embedded engines.

    Args:
        model: its tensors are moved into memory that the copies share, so no other object may use them.
            In the CPU's memory.
        config: sizes of each copy, the number of copies, and their devices; none: all on the CPU.
        deterministic: as for the embedded engine; conversations go to copies in the order in which they
            are opened.
        tokenizer: finds stop texts and reads grammars; None: requests with either are refused.
        launcher: starts the copies' processes; None: on this machine.
        sync: transfer of new weights to the copies; None: through memory.
        pool: supervision of the copies.
        on_incident: called for each copy that is lost.

    Raises:
        EngineFailed: if a copy does not start.
        ValueError: if the model cannot be cut over the ranks of a copy.
    """

    def __init__(
        self,
        model: CausalModel,
        config: EmbeddedConfig,
        *,
        deterministic: bool,
        tokenizer: TokenizerFolder | None = None,
        launcher: Launcher | None = None,
        sync: Syncing | None = None,
        pool: PoolConfig | None = None,
        on_incident: OnIncident = print_incident,
    ) -> None:
        ranks, pool, sync = config.tensor_parallel, pool or PoolConfig(), sync or Syncing(SyncConfig(), Path())
        devices = config.copy_devices or ["cpu"] * config.num_processes
        if ranks > 1:
            check_split(model, ranks)
        threads = max(1, torch.get_num_threads() // len(devices))
        shapes = dict(model.named_weights())
        launcher = launcher or LocalLauncher()
        self._memory = SharedFile(share(model))
        self._rendezvous = Path(tempfile.mkdtemp(prefix="whet-ranks-"))
        setup = Setup(
            self._memory.shared,
            config,
            devices[0],
            deterministic,
            threads,
            tokenizer,
            mapped=sync.config.is_mapped,
            keeps_weights=sync.config.transport == "delta",
        )
        starts = [
            Starter(
                f"engine copy {i}",
                setup,
                devices[i * ranks : (i + 1) * ranks],
                launcher,
                self._rendezvous / str(i),
                pool.start_timeout_s,
            )
            for i in range(len(devices) // ranks)
        ]
        try:
            sender = sender_of(sync.config, model, sync.folder, launcher.address)
            copies = start_all(starts)
        except BaseException:
            self._release_memory()
            raise
        slots = [Slot(copy.name, start, copy, breaker_of(pool)) for copy, start in zip(copies, starts, strict=True)]
        tolerance = 0.0 if deterministic else SCORE_TOLERANCE[model.dtype]  # machines may round otherwise, where no bits are promised
        super().__init__(slots, WeightSync(sender, shapes), pool, deterministic=deterministic, on_incident=on_incident, tolerance=tolerance)

    def end(self) -> None:
        super().end()
        self._release_memory()

    def _release_memory(self) -> None:
        self._memory.remove()
        shutil.rmtree(self._rendezvous, ignore_errors=True)


class Starter:
    """Starts a copy, again and again. Its `__call__` may run in any thread.

    Args:
        name: name of the copy.
        setup: setup of its first rank.
        devices: devices of its ranks.
        launcher: launcher of their processes.
        rendezvous: place where the ranks meet, a file for each start.
        timeout_s: for the copy to be ready.
    """

    def __init__(self, name: str, setup: Setup, devices: Sequence[str], launcher: Launcher, rendezvous: Path, timeout_s: float) -> None:
        self._name, self._setup, self._devices, self._launcher = name, setup, devices, launcher
        self._rendezvous, self._timeout_s = rendezvous, timeout_s
        self._starts = itertools.count(1)

    def __call__(self, given_up: threading.Event) -> CopyProcess:
        number = next(self._starts)
        setup = replace(self._setup, name=self._name if number == 1 else f"{self._name}, start {number}")
        copy = CopyProcess(self._name, setup, self._devices, Path(f"{self._rendezvous}-{number}"), self._launcher, given_up)
        copy.ready(given_up, self._timeout_s)
        if given_up.is_set():
            copy.stop()
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
                    each.result().stop()
            raise


class SharedFile:
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

    def remove(self) -> None:
        self._named.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
