"""Data of the commands that learn from given data, in batches of a step: conversations, and preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from whet.core.batch import TrainBatch, batch_of
from whet.core.preference import pair_batch
from whet.core.weights import REDUCERS
from whet.data.preference import PreferenceSource, preference_source
from whet.data.supervised import SupervisedSource, supervised_source
from whet.data.template import Renderer
from whet.observe.metrics import Metrics, merge_metrics
from whet.settings.supervised import HeldOutConfig, PairRunConfig, SupervisedRunConfig, held_out_rows
from whet.supervised_loop import HeldOut

Measure = Callable[[TrainBatch], Metrics]
"""Metrics of a batch that does not train."""


@dataclass(frozen=True, slots=True)
class StepData:
    """A run's data, read and rendered."""

    source: SupervisedSource | PreferenceSource
    take: Callable[[], TrainBatch]
    """Takes the batch of the next step, with its weights."""
    facts: dict[str, str]
    """Facts that are shown before the run."""
    held_out: Callable[[Measure], HeldOut] | None = None
    """Returns the measurement of the held-out data; None: nothing is held out."""


def conversations(config: SupervisedRunConfig, renderer: Renderer) -> StepData:
    """Data of a supervised run."""
    source = supervised_source(config.data, renderer, run_seed=config.seed)
    reducer = REDUCERS[config.reducer]

    def take() -> TrainBatch:
        batch = batch_of(source.next(config.samples_per_step))
        return batch.with_(weights=reducer(batch))

    facts, rows = {"conversations": str(len(source))}, held_out_rows(config.data, config.evaluate)
    if rows is None:
        return StepData(source, take, facts)
    held = supervised_source(rows, renderer, run_seed=config.seed, name="held_out")
    every, facts["held out"] = held.next(len(held)), str(len(held))

    def batches() -> Iterator[TrainBatch]:
        for start in range(0, len(every), config.samples_per_step):
            yield batch_of(every[start : start + config.samples_per_step])

    return StepData(source, take, facts, lambda measure: held_out(config.evaluate, batches, measure))


def pairs(config: PairRunConfig, renderer: Renderer) -> StepData:
    """Training pairs, and those held out."""
    rows = held_out_rows(config.data, config.evaluate)
    held = None if rows is None else preference_source(rows, renderer, run_seed=config.seed, name="held_out")
    source = preference_source(config.data, renderer, run_seed=config.seed)
    left_out = f" ({source.num_dropped} too long, {source.num_same} with two equal replies left out)"
    facts = {"pairs": f"{len(source)}" + (left_out if source.num_dropped or source.num_same else "")}

    def take() -> TrainBatch:
        return pair_batch(source.next(config.pairs_per_step))

    if held is None:
        return StepData(source, take, facts)
    facts["held out"] = str(len(held))
    every = held.all()

    def batches() -> Iterator[TrainBatch]:
        for start in range(0, len(every), config.pairs_per_step):
            yield pair_batch(every[start : start + config.pairs_per_step])

    return StepData(source, take, facts, lambda measure: held_out(config.evaluate, batches, measure))


def held_out(config: HeldOutConfig, batches: Callable[[], Iterable[TrainBatch]], measure: Measure) -> HeldOut:
    """All held-out batches through `measure`; its metrics are `eval/...` then."""

    def measure_all() -> Metrics:
        metrics: Metrics = {}
        for batch in batches():
            metrics = merge_metrics(metrics, measure(batch))
        return {f"eval/{name}": value for name, value in metrics.items()}

    return HeldOut(measure_all, config.interval, config.before_training)
