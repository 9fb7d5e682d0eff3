"""The loop of the runs that learn from data as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whet.checkpoint.run_state import RunState
from whet.core.batch import TrainBatch
from whet.data.special import SPELLED_METRIC
from whet.loop import Evaluated, Observer
from whet.observe.metrics import Metrics, Total, flatten, merge_metrics
from whet.stop import Stop
from whet.train.batching import due
from whet.train.supervised import SupervisedLearner
from whet.types import Progress


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Measurement on data that do not train."""

    measure: Callable[[], Metrics]
    interval: int | None
    first: bool
    """True if it is also measured before the first step."""

    def due(self, step: int, total: int) -> bool:
        return self.first if step == 0 else due(step, total, self.interval)


@dataclass(slots=True)
class SupervisedRun:
    """The live objects of a run."""

    num_steps: int
    take: Callable[[], TrainBatch]
    """Batch of the next step, with its weights."""
    learner: SupervisedLearner
    held_out: HeldOut | None
    evaluated: Evaluated
    """The last values of what is held out; a checkpoint has them too."""
    checkpoint: RunState
    observer: Observer
    stop: Stop
    num_spelled: int = 0
    """Special tokens that the data's texts spell, and that are text."""

    def measure(self, step: int) -> Metrics:
        """Measure what is held out."""
        assert self.held_out is not None
        with self.observer.phases.span("evaluate"):
            found = self.held_out.measure()
        self.evaluated.after, self.evaluated.values = step, flatten(found)
        rows = [(name.removeprefix("eval/"), value) for name, value in self.evaluated.values.items()]
        self.observer.display.table(f"held out, after {step} steps", ("metric", "value"), rows)
        self.observer.evaluated(step, self.evaluated.values)
        return found

    def end_if_asked(self, step: int) -> dict[str, float]:
        """Have the run end here if its watch said so.

        Returns:
            What was held out, if it was not measured at this step yet; its line is written.
        """
        if not self.observer.is_ended:
            return {}
        self.num_steps = step
        if self.held_out is None or self.evaluated.after == step:
            return {}
        values = self.observer.log(step, self.measure(step))
        for tracker in self.observer.trackers[1:]:
            tracker.log(step, values)
        return values


def train_supervised(run: SupervisedRun) -> dict[str, float]:
    """Optimizer steps on a source's batches, with what is held out measured at its interval.

    Returns:
        The last values of `eval/...`, also where the run had come to its end before; nothing where nothing is held out.

    Raises:
        Stopped: if a signal asked for it, after the step was finished and saved.
    """
    progress = run.checkpoint.resume()
    if progress.optimizer_step == 0:
        log(run, 0, {})
        run.end_if_asked(0)
    while progress.optimizer_step < run.num_steps:
        with run.observer.phases.span("update"):
            update = run.learner.update(run.take())
        run.observer.phases.add_tokens("update", update.num_tokens)
        progress.optimizer_step += 1
        progress.rollout_id += 1
        spelled: Metrics = {SPELLED_METRIC: Total(run.num_spelled)} if run.num_spelled else {}
        values = log(run, progress.optimizer_step, {**update.metrics, **spelled})
        values |= run.end_if_asked(progress.optimizer_step)
        save_if_due(run, progress, values)
        run.stop.check()
    return run.evaluated.values


def log(run: SupervisedRun, step: int, metrics: Metrics) -> dict[str, float]:
    """Measure what is held out, if that is due, and write the step's line, if there is anything to write."""
    if run.held_out is not None and run.held_out.due(step, run.num_steps):
        metrics = merge_metrics(metrics, run.measure(step))
    if not metrics:
        return {}
    values = run.observer.log(step, metrics)
    run.observer.tell(step, values)
    return values


def save_if_due(run: SupervisedRun, progress: Progress, values: dict[str, float]) -> None:
    """Save at the configured interval, at a new best, at the end, and when the run is asked to stop."""
    if run.stop.asked or run.checkpoint.due(progress, run.num_steps, values):
        with run.observer.phases.span("save"):
            run.checkpoint.save(progress, values)
