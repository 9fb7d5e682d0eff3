"""The loops. Each reads as the algorithm; what its verbs do lives in the layers below."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from whet.algo.sft import sft_loss
from whet.checkpoint.store import CheckpointStore
from whet.core.batch import TrainBatch, batch_of
from whet.core.weights import Reducer
from whet.data.source import Source
from whet.data.supervised import SupervisedSource
from whet.evaluate.evaluation import EvaluationSet
from whet.observe import Display, Mean, Metrics, Phases, RecordWriter, Tracker, flatten, memory, merge_metrics
from whet.rollout.collect import Player
from whet.rollout.report import new_failures, require_valid, rollout_metrics
from whet.rollout.samples import samples_of_groups
from whet.sync.base import Publisher
from whet.train.base import Backend
from whet.train.learners import Learners, Update
from whet.types import Group, Progress, Sample

T = TypeVar("T")


@dataclass(slots=True)
class Observer:
    """Where a run's numbers and words go."""

    display: Display
    trackers: Sequence[Tracker]
    phases: Phases
    records: RecordWriter | None = None
    seen_failures: set[tuple[str, str]] = field(default_factory=set)

    def step(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Log a step, with phase times and memory added."""
        values = flatten(merge_metrics(metrics, merge_metrics(self.phases.take(), memory())))
        for tracker in self.trackers:
            tracker.log(step, values)
        self.display.step(step, values)
        return values

    def failures(self, groups: Sequence[Group]) -> None:
        """Show the first failure of each kind, with its traceback."""
        for name, error in new_failures(groups, self.seen_failures):
            self.display.warn(f"trajectory {name} failed in {error.where}: {error.kind}: {error.message}\n{error.traceback}")

    def close(self) -> None:
        try:
            for tracker in self.trackers:
                tracker.close()
        finally:
            self.display.close()


@dataclass(slots=True)
class Run:
    """The live objects of a reinforcement learning run."""

    num_rollouts: int
    seed: int
    samples_per_prompt: int
    prompts_per_rollout: int
    source: Source
    player: Player
    learners: Learners
    publisher: Publisher
    evaluations: Sequence[EvaluationSet]
    evaluate_every: int | None
    evaluate_first: bool
    checkpoint: CheckpointStore
    observer: Observer
    thread: Executor
    """Where torch work runs: off the event loop, so that tools and deadlines go on meanwhile."""
    resume: Callable[[], tuple[Progress, dict[str, float]]]
    """The counters to go on from, and the last evaluation's values."""
    save: Callable[[Progress, Mapping[str, float]], None]

    async def compute(self, work: Callable[[], T]) -> T:
        """Run torch work on the torch thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def evaluation_due(self, rollout_id: int) -> bool:
        return rollout_id == self.num_rollouts or (self.evaluate_every is not None and rollout_id % self.evaluate_every == 0)


async def train_rl(run: Run) -> dict[str, float]:
    """Reinforcement learning: roll out, assign credit, update, publish; see `docs/architecture.md`.

    Returns:
        The values of the last evaluation.
    """
    progress, evaluated = run.resume()
    phases = run.observer.phases
    await run.publisher.connect()
    await run.publisher.publish(progress.version)
    if progress.rollout_id == 0 and run.evaluate_first:
        evaluated = await evaluate(run, progress)
    while progress.rollout_id < run.num_rollouts:
        with phases.span("rollout"):
            groups = await roll_out(run, progress)
        samples = samples_of_groups(groups)
        batch = batch_of(samples)
        with phases.span("annotate"):
            batch = await run.compute(lambda: run.learners.annotate(batch))  # noqa: B023
        batch, credit = run.learners.algorithm.assign_credit(batch)
        with phases.span("update"):
            update = await run.compute(lambda: run.learners.update(batch, progress))  # noqa: B023
        phases.add_tokens("update", update.num_tokens)
        progress.rollout_id += 1
        progress.version += 1
        with phases.span("publish"):
            await run.publisher.publish(progress.version)
        observe(run, progress, groups, samples, batch, update, credit)
        if run.evaluation_due(progress.rollout_id):
            evaluated = await evaluate(run, progress)
        if run.checkpoint.due(progress.rollout_id, run.num_rollouts):
            with phases.span("save"):
                await run.compute(lambda: run.save(progress, evaluated))  # noqa: B023
    await run.publisher.close()
    return evaluated


async def roll_out(run: Run, progress: Progress) -> list[Group]:
    """Take the next prompts and play them.

    Raises:
        RolloutFailed: if every trajectory failed.
    """
    tasks = run.source.next(run.prompts_per_rollout)
    groups = await run.player.play(tasks, run.samples_per_prompt, run.seed)
    run.observer.phases.add_tokens("rollout", sum(t.num_tokens_sampled for g in groups for t in g.trajectories))
    run.observer.failures(groups)
    require_valid(groups, f"rollout {progress.rollout_id}")
    return groups


def observe(
    run: Run,
    progress: Progress,
    groups: Sequence[Group],
    samples: Sequence[Sample],
    batch: TrainBatch,
    update: Update,
    credit: Metrics,
) -> None:
    """Metrics to the trackers, every token to the records."""
    if "policy/loss" not in update.metrics:
        run.observer.display.warn(f"rollout {progress.rollout_id - 1} trained nothing: no group has two valid trajectories")
    if run.observer.records is not None:
        found = {"train_logprobs": update.train_logprobs, "advantages": batch.advantages}
        columns = {name: batch.ragged(column) for name, column in found.items() if column is not None}
        run.observer.records.write(progress.rollout_id - 1, groups, samples, columns)
    counters = {"run/optimizer_step": float(progress.optimizer_step), "run/version": float(progress.version)}
    metrics = merge_metrics(merge_metrics(credit, update.metrics), {name: Mean(value, 1) for name, value in counters.items()})
    run.observer.step(progress.rollout_id, merge_metrics(rollout_metrics(groups), metrics))


async def evaluate(run: Run, progress: Progress) -> dict[str, float]:
    """Play every evaluation set, and log what it gave."""
    values: dict[str, float] = {}
    if not run.evaluations:
        return values
    for chosen in run.evaluations:
        with run.observer.phases.span("evaluate"):
            metrics, groups = await chosen.run(progress.rollout_id, run.seed)
        run.observer.failures(groups)
        values.update(flatten(metrics))
    for tracker in run.observer.trackers:
        tracker.log(progress.rollout_id, values)
    for chosen in run.evaluations:
        prefix = f"eval/{chosen.name}/"
        rows = [(key.removeprefix(prefix), value) for key, value in values.items() if key.startswith(prefix)]
        run.observer.display.table(f"evaluation {chosen.name} after {progress.rollout_id} rollouts", ("metric", "value"), rows)
    return values


@dataclass(slots=True)
class SupervisedRun:
    """The live objects of a supervised run."""

    num_steps: int
    samples_per_step: int
    source: SupervisedSource
    backend: Backend
    reducer: Reducer
    checkpoint: CheckpointStore
    observer: Observer
    resume: Callable[[], tuple[Progress, dict[str, float]]]
    save: Callable[[Progress, Mapping[str, float]], None]


def train_sft(run: SupervisedRun) -> Progress:
    """Supervised fine-tuning on the assistant's tokens."""
    progress, _ = run.resume()
    while progress.optimizer_step < run.num_steps:
        with run.observer.phases.span("update"):
            batch = batch_of(run.source.next(run.samples_per_step))
            batch = batch.with_(weights=run.reducer(batch))
            found = run.backend.forward_backward(batch, sft_loss)
            metrics = merge_metrics(found.metrics, run.backend.optim_step())
        run.observer.phases.add_tokens("update", found.num_tokens)
        progress.optimizer_step += 1
        progress.rollout_id += 1
        run.observer.step(progress.optimizer_step, metrics)
        if run.checkpoint.due(progress.optimizer_step, run.num_steps):
            with run.observer.phases.span("save"):
                run.save(progress, {})
    return progress
