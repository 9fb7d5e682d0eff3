"""Publishing to any engine: bytes move only into one with weights of its own, however they travel there, and the proof is the same."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

from torch import Tensor

from whet.algo.base import Need
from whet.core.batch import batch_of
from whet.engine.base import SCORE_TOLERANCE, Engine, EngineFailed, nats_apart
from whet.model.causal import CausalModel
from whet.model.digest import differences, digests_of
from whet.sync.base import Publication, SyncError, SyncTimes
from whet.sync.tap import Tap
from whet.train.base import Backend, NonFinite
from whet.transport.base import Stream, TransportError
from whet.types import UNSAMPLED, Origin, Receipt, Sample, Scored

PROBE_TOKENS = 12


class SharedPublisher:
    """Publishes to an engine, and compares digests and a probe before the version counts.

    Args:
        backend: whose weights are published.
        model: the trainer's model.
        engine: who takes them over.
        thread: where torch work runs.
    """

    def __init__(self, backend: Backend, model: CausalModel, engine: Engine, thread: Executor) -> None:
        self._backend, self._model, self._engine, self._thread = backend, model, engine, thread
        self._failed = False
        """Whether the engine stands still because the last version was not proven."""
        self._probe = tuple((7 * i + 3) % model.vocab_size for i in range(PROBE_TOKENS))

    async def publish(self, version: int) -> Publication:
        began, was_paused = time.perf_counter(), self._engine.paused and not self._failed
        self._failed = True
        try:
            await self._engine.pause()
            publication = await self._proven(version, began)
            if not was_paused:  # else whoever had it pause has it go on
                await self._engine.resume()
            self._failed = False
            return publication
        except (EngineFailed, TransportError) as error:
            raise SyncError(str(error)) from error

    async def _proven(self, version: int, paused: float) -> Publication:
        """Published while the engine is paused (since `paused`), and it stays so if this raises."""
        loop = asyncio.get_running_loop()
        tap = Tap(self._stream())
        receipt = await self._take_over(tap, version)
        taken_over = time.perf_counter()
        if receipt.version != version or self._engine.version != version:
            raise SyncError(f"the engine answers version {receipt.version} to the publication of version {version}")
        sent = await loop.run_in_executor(self._thread, tap.finish)
        held = await loop.run_in_executor(self._thread, lambda: digests_of(self._expected()))
        for answer in receipt.members or (receipt,):
            self._check(answer, version, sent, held)
        probe_nats = await self._compare_probe(version)
        times = SyncTimes(
            gather_s=tap.gather_s,
            convert_s=tap.digest_s + receipt.encode_s,
            wire_s=receipt.wire_s,
            load_s=receipt.load_s,
            prove_s=(proven := time.perf_counter()) - taken_over,
            pause_s=proven - paused,
        )
        return Publication(receipt, probe_nats, times)

    def _check(self, answer: Receipt, version: int, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
        for what, mine, digests in (("received", sent, answer.wire), ("holds", held, answer.resident)):
            if digests is not None and (wrong := differences(mine, digests)):
                more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
                raise SyncError(f"version {version}: {answer.engine} {what} other weights than the trainer's: {', '.join(wrong[:5])}{more}")
        if answer.num_stale_tokens:
            raise SyncError(f"version {version}: {answer.engine} still has {answer.num_stale_tokens} tokens cached from older weights")

    async def _take_over(self, weights: Stream, version: int) -> Receipt:
        try:
            return await self._engine.update(weights, version)
        except ValueError as refused:
            raise SyncError(f"version {version}: the engine refused the weights: {refused}") from refused

    def _stream(self) -> Iterable[tuple[str, Tensor]]:
        """What is published: an engine that reads the trainer's own tensors reads an adapter's, too; another one gets merged weights."""
        if self._engine.capabilities.shares_weights and self._model.adapter is not None:
            return self._model.named_weights()
        return self._backend.named_weights()

    def _expected(self) -> Iterable[tuple[str, Tensor]]:
        """What the engine must hold then."""
        return self._model.named_state() if self._engine.capabilities.shares_weights else self._backend.named_state()

    async def _compare_probe(self, version: int) -> float:
        """The largest difference in nats between the engine's cached decode path and the trainer's packed row."""
        expected = await asyncio.get_running_loop().run_in_executor(self._thread, self._score)
        if not all(map(math.isfinite, expected)):
            raise NonFinite(f"version {version}: the trainer's own log-probs of a fixed prompt are not finite: training has diverged")
        worst = nats_apart(await self._engine.score(self._probe), Scored(tuple(expected)))
        if not worst <= SCORE_TOLERANCE[self._backend.dtype]:
            raise SyncError(f"version {version}: the engine scores the probe {worst:.3g} nats away from the trainer")
        return worst

    def _score(self) -> list[float]:
        """The probe's log-probs, in a training row."""
        count = len(self._probe)
        nothing, mask = (0.0,) * count, (False, *(True,) * (count - 1))
        sample = Sample(self._probe, (Origin.PROMPT,) * count, mask, nothing, (UNSAMPLED,) * count, group="probe", trajectory="probe")
        found = self._backend.annotate(batch_of([sample]), Need.OLD_LOGPROBS).old_logprobs
        assert found is not None
        return found[1:].tolist()
