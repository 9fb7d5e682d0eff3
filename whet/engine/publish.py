"""Publish the trainer's weights to an engine, and prove that it holds them before the new version counts.

An engine that shares the trainer's memory gets no bytes; another one gets a stream of tensors, however it travels (`whet/transport`). The
proof is the same: digests of every tensor on both sides, and the log-probs of a fixed prompt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from whet.algo.base import Need
from whet.core.batch import TrainBatch, batch_of
from whet.core.nonfinite import NonFinite
from whet.engine.base import SCORE_TOLERANCE, Engine, EngineFailed, nats_apart
from whet.engine.checksums import ChecksumHistory
from whet.engine.layout import Heads, expected
from whet.engine.pool.pool import EnginePool
from whet.engine.proofs import ProofTable
from whet.model.causal import CausalModel
from whet.model.digest import differences, digests_of
from whet.observe.metrics import Max, Metrics, Min, Total
from whet.transport.base import Stream, TransportError
from whet.types import JSON, Proof, Receipt, RunFailed, Scored
from whet.types.columns import Doubles, Ints, Runs
from whet.types.records import unsampled

PROBE_TOKENS = 12


class SyncError(RunFailed):
    """An engine does not hold what the trainer holds. No token is sampled under the new version."""


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Time of a publication, by its parts, in seconds. Parts overlap: engines may load while the
    trainer still gathers."""

    gather_s: float
    """The trainer put its tensors together, in the type that they travel in."""
    convert_s: float
    """Digests of what is sent; packing and compressing."""
    wire_s: float
    """Copying, writing or sending, as far as it held up the trainer."""
    load_s: float
    """The slowest engine took the weights over, and took digests."""
    prove_s: float
    """Digests of what the trainer holds compared with what the engines hold, and the probe on both sides."""
    pause_s: float
    """No token was sampled: all of the above, proof included."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that the engine was proven to hold."""

    receipt: Receipt
    proof: Proof
    """Level of proof, of the member with the weakest. The probe goes through the engine's cached decode path."""
    times: SyncTimes

    def metrics(self) -> Metrics:
        """`sync/...`: seconds by part, bytes that left the trainer's process, the level of proof."""
        seconds: Metrics = {f"sync/{part}": Total(found) for part, found in asdict(self.times).items()}
        level: Metrics = {"sync/proven_arrival": Min(float(self.proof.arrival)), "sync/proven_share": Min(self.proof.memory_share)}
        if self.proof.probe_nats is not None:
            level["sync/probe_nats"] = Max(self.proof.probe_nats)
        return {**seconds, **level, "sync/bytes": Total(self.receipt.wire_bytes)}


class Publisher(Protocol):
    """Brings weights to engines."""

    @property
    def proofs(self) -> Mapping[int, Proof]:
        """Proof of each version so far, as far as it is known."""
        ...

    async def publish(self, version: int) -> Publication:
        """Publish the trainer's present weights as `version`.

        Raises:
            SyncError: if an engine's receipt or probe does not agree with the trainer.
            NonFinite: if the trainer's own weights no longer give finite log-probs.
        """
        ...


class Trained(Protocol):
    """The model that trains, as far as publishing needs it (`whet.train.base.Backend`)."""

    dtype: torch.dtype
    """Type of its computation, and of the weights in `named_weights`."""

    def named_weights(self, kind: Literal["merged", "adapter", "base"] = "merged") -> Iterable[tuple[str, Tensor]]:
        """The weights as a stream, as `whet.train.base.Backend.named_weights`."""
        ...

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        """Everything that the merged model's outputs depend on: tied parameters under each of their names, and buffers."""
        ...

    def annotate(self, batch: TrainBatch, need: Need) -> TrainBatch:
        """The batch with the log-probs that `need` asks for."""
        ...


class DigestingStream(Stream):
    """A stream of weights that takes the digest of each before anybody else sees it, so that they are put together only once.

    Args:
        weights: the trainer's.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(self._digested(iter(weights)))
        self.digests: dict[str, str] = {}
        self.gather_s, self.digest_s = 0.0, 0.0
        """Seconds of putting tensors together, and of their digests."""

    def finish(self) -> dict[str, str]:
        """Read the stream to its end, even if a reader stopped before it, and return the digests of all
        weights."""
        for _ in self:
            pass
        return self.digests

    def _digested(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while True:
            began = time.perf_counter()
            found = next(weights, None)
            gathered = time.perf_counter()
            self.gather_s += gathered - began
            if found is None:
                return
            self.digests |= digests_of([found])
            self.digest_s += time.perf_counter() - gathered
            yield found


class EnginePublisher:
    """Publishes to an engine, and compares digests and a probe before the version counts.

    Args:
        backend: the model whose weights are published.
        model: the trainer's model.
        engine: the engine that takes them over.
        thread: runs torch work.
    """

    def __init__(self, backend: Trained, model: CausalModel, engine: Engine, thread: Executor) -> None:
        self._backend, self._model, self._engine, self._thread = backend, model, engine, thread
        self._table = ProofTable()
        self._checksums = ChecksumHistory()
        self._base_layouts: dict[str, set[str]] = {}
        """Digests of the weights below an adapter, as `expected` gives them: they do not change."""
        self._failed = False
        """True while the engine stays paused because the last version was not proven."""
        self._probe = Ints((7 * i + 3) % model.vocab_size for i in range(PROBE_TOKENS))

    @property
    def proofs(self) -> dict[int, Proof]:
        """Proof of each version so far; members that took the present one over later are within it."""
        found, version = self._table.snapshot(), self._engine.version
        if version in found and isinstance(self._engine, EnginePool):
            found[version] = found[version].through(self._engine.later_proof)
        return found

    def state(self) -> JSON:
        """The proofs by version."""
        return {str(version): proof.to_json() for version, proof in self.proofs.items()}

    def restore(self, state: JSON) -> None:
        """Go on with the proofs that `state` gave."""
        self._table = ProofTable({int(version): Proof.from_json(proof) for version, proof in state.items()})

    async def publish(self, version: int) -> Publication:
        began, was_paused = time.perf_counter(), self._engine.paused and not self._failed
        self._failed = True
        try:
            await self._engine.pause()
            publication = await self._proven(version, began)
            if not was_paused:  # else the caller that paused it continues it
                await self._engine.resume()
            self._failed = False
            return publication
        except (EngineFailed, TransportError) as error:
            raise SyncError(str(error)) from error

    async def _proven(self, version: int, paused: float) -> Publication:
        """Published while the engine is paused (since `paused`), and it stays so if this raises."""
        loop = asyncio.get_running_loop()
        self._table = ProofTable(self.proofs)  # nobody takes the version before over any more
        stream = DigestingStream(self._stream())
        receipt = await self._take_over(stream, version)
        taken_over = time.perf_counter()
        if receipt.version != version or self._engine.version != version:
            raise SyncError(f"the engine answers version {receipt.version} to the publication of version {version}")
        sent = await loop.run_in_executor(self._thread, stream.finish)
        answers = receipt.members or (receipt,)
        tells_memory = any(answer.resident is not None for answer in answers)
        held = await loop.run_in_executor(self._thread, lambda: digests_of(self._expected()) if tells_memory else {})
        for answer in answers:
            self._check(answer, version, sent if receipt.sent is None else receipt.sent, held)
        self._checksums.check(answers, sent, str(self._backend.dtype).removeprefix("torch."))
        alike = sent.keys() if receipt.sent is None else {name for name, digest in sent.items() if receipt.sent.get(name) == digest}
        share = await loop.run_in_executor(self._thread, self._check_layouts, answers, version, alike)
        probe_nats = await self._compare_probe(version)
        times = SyncTimes(
            gather_s=stream.gather_s,
            convert_s=stream.digest_s + receipt.encode_s,
            wire_s=receipt.wire_s,
            load_s=receipt.load_s,
            prove_s=(proven := time.perf_counter()) - taken_over,
            pause_s=proven - paused,
        )
        proof = Proof(all(answer.wire is not None for answer in answers), share, probe_nats)
        self._table.add(version, proof)
        return Publication(receipt, proof, times)

    def _check(self, answer: Receipt, version: int, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
        for what, mine, digests in (("received", sent, answer.wire), ("holds", held, answer.resident)):
            if digests is not None and (wrong := differences(mine, digests)):
                more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
                raise SyncError(f"version {version}: {answer.engine} {what} other weights than the trainer's: {', '.join(wrong[:5])}{more}")
        if answer.num_stale_tokens:
            raise SyncError(f"version {version}: {answer.engine} still has {answer.num_stale_tokens} tokens cached from older weights")

    def _check_layouts(self, answers: Sequence[Receipt], version: int, names: Collection[str]) -> float:
        """Compare what servers hold in layouts of their own, of weights that were sent as they are; the share of parameters that could be
        compared, of the engine with the fewest."""
        digests: dict[str, set[str]] = {}
        for answer in answers:
            for key, digest in (answer.layout or {}).items():
                digests.setdefault(key, set()).add(digest)
        heads, adapts = Heads.of(self._model.hf.config.get_text_config()), self._engine.capabilities.takes_adapters
        if adapts:
            if new := {key: found for key, found in digests.items() if not found <= self._base_layouts.get(key, set())}:
                self._base_layouts |= expected(self._backend.named_weights("base"), heads, new)
            mine, num_untold = self._base_layouts, len(names)
        else:
            weights = ((name, weight) for name, weight in self._backend.named_weights() if name in names)
            mine, num_untold = expected(weights, heads, digests) if digests else {}, 0
        shares: list[float] = []
        for answer in answers:
            layout = answer.layout or {}
            compared = layout.keys() & mine.keys()
            if wrong := sorted(key for key in compared if layout[key] not in mine[key]):
                more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
                raise SyncError(f"version {version}: {answer.engine} holds other weights than the trainer's: {', '.join(wrong[:5])}{more}")
            shares.append(1.0 if answer.resident is not None else len(compared) / max(1, len(layout) + num_untold))
        return min(shares)

    async def _take_over(self, weights: Stream, version: int) -> Receipt:
        try:
            return await self._engine.update(weights, version)
        except ValueError as refused:
            raise SyncError(f"version {version}: the engine refused the weights: {refused}") from refused

    def _stream(self) -> Iterable[tuple[str, Tensor]]:
        """The weights to publish: an engine that reads the trainer's own tensors reads an adapter's, too; one that takes adapters gets that
        alone, and any other merged weights."""
        if self._engine.capabilities.takes_adapters:
            return self._backend.named_weights("adapter")
        if self._engine.capabilities.shares_weights and self._model.adapter is not None:
            return self._model.named_weights()
        return self._backend.named_weights()

    def _expected(self) -> Iterable[tuple[str, Tensor]]:
        """The weights that the engine must hold after the update."""
        return self._model.named_state() if self._engine.capabilities.shares_weights else self._backend.named_state()

    async def _compare_probe(self, version: int) -> float:
        """The largest difference in nats between the engine's cached decode path and the trainer's packed row."""
        expected = await asyncio.get_running_loop().run_in_executor(self._thread, self._score)
        if not all(map(math.isfinite, expected)):
            narrow = ", or float16 is too narrow for this model (model.dtype)" if self._backend.dtype == torch.float16 else ""
            what = "the trainer's own log-probs of a fixed prompt are not finite"
            raise NonFinite(f"version {version}: {what}: training has diverged{narrow}")
        worst = nats_apart(await self._engine.score(self._probe), Scored(Doubles(expected)))
        if not worst <= max(SCORE_TOLERANCE[self._backend.dtype], self._engine.capabilities.quantization_nats):
            raise SyncError(f"version {version}: the engine scores the probe {worst:.3g} nats away from the trainer")
        return worst

    def _score(self) -> list[float]:
        """The probe's log-probs, in a training row."""
        count = len(self._probe)
        sample = unsampled(self._probe, Runs.from_runs([(False, 1), (True, count - 1)]))
        found = self._backend.annotate(batch_of([sample]), Need.OLD_LOGPROBS).old_logprobs
        assert found is not None
        return found[1:].tolist()
