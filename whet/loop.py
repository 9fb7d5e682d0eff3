"""The loops. Each reads as the algorithm; what its verbs do lives in the layers below."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from whet.background import collect_less
from whet.checkpoint.random_state import RandomState
from whet.checkpoint.run_state import RunState, Stateful
from whet.config import Hook
from whet.core.batch import TrainBatch, batch_of
from whet.engine.publish import Publisher
from whet.evaluate.evaluation import EvaluationSet, set_folders
from whet.observe.display import Display
from whet.observe.metrics import Mean, Metrics, Total, flatten, merge_metrics
from whet.observe.peaks import memory
from whet.observe.records import RecordThread, drop_records
from whet.observe.replies import TABLE_ROWS, chosen_replies
from whet.observe.spans import Phases
from whet.observe.trackers import ReplyTracker, Tracker
from whet.observe.watch import Watch
from whet.rollout.constant import RewardGuard
from whet.rollout.metrics import further_metrics, new_failures, require_valid, rollout_metrics
from whet.rollout.recipe import Recipe
from whet.rollout.scheduler import RolloutResult, Rollouts
from whet.rollout.token_account import DROPPED, UNACCOUNTED, num_dropped, unaccounted
from whet.rollout.user_rollouts import OwnRollouts
from whet.runfolder.journal import Journal
from whet.stop import Stop, Stopped
from whet.threads import ThreadWatch
from whet.train.batching import due
from whet.train.learners import Learners, Update
from whet.train.recorded import numbers_of
from whet.types import JSON, Group, Progress, Proof, Sample

T = TypeVar("T")


@dataclass(slots=True)
class Observer:
    """Receivers of a run's numbers and messages."""

    display: Display
    """Display for the user; the run's log gets the same."""
    display_without_log: Display
    """The display without the log, for messages that quote data."""
    journal: Journal
    trackers: Sequence[Tracker]
    """The first is that of `metrics.jsonl`."""
    phases: Phases
    records: RecordThread | None = None
    seen_failures: set[tuple[str, str]] = field(default_factory=set)
    threads: ThreadWatch | None = None
    """Notices when torch's threads hold each other up."""
    watch: Watch | None = None
    """The caller's, in Python."""
    num_shown: int = 0
    """Replies of each rollout and evaluation that are printed."""
    is_ended: bool = False
    """True once the watch has said that the run ends here."""

    def log(self, step: int, metrics: Metrics) -> dict[str, float]:
        """A step's line of `metrics.jsonl`, with phase times and memory added."""
        values = flatten(merge_metrics(metrics, merge_metrics(self.phases.take(), memory())))
        self.trackers[0].log(step, values)
        return values

    def tell(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the step's values on to the other receivers."""
        for tracker in self.trackers[1:]:
            tracker.log(step, values)
        self.display.step(step, values)
        for note in [] if self.threads is None else self.threads.after_step(values):
            self.display.warn(note)
        if self.watch is not None:
            self.is_ended |= self.watch.on_step(step, values)

    def replies(self, step: int, groups: Sequence[Group], name: str = "replies") -> None:
        """Print replies, if the settings ask for it, and pass some on to the trackers that take them."""
        for reply in chosen_replies(groups, self.num_shown):
            self.display_without_log.note(reply.as_text())
        takers = [tracker for tracker in self.trackers[1:] if isinstance(tracker, ReplyTracker)]
        rows = chosen_replies(groups, TABLE_ROWS) if takers else []
        for tracker in takers if rows else []:
            tracker.replies(step, name, rows)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Show an evaluation to the watch."""
        if self.watch is not None:
            self.is_ended |= self.watch.on_evaluation(step, values)

    def failures(self, groups: Sequence[Group]) -> None:
        """Show the first failure of each kind, with its traceback."""
        note_failures(self.journal, groups)
        for name, error in new_failures(groups, self.seen_failures):
            self.display_without_log.warn(f"trajectory {name} failed in {error.where}: {error.kind}: {error.message}\n{error.traceback}")

    def forget(self, first_rollout: int, first_evaluation: int) -> None:
        """Remove the records of rollouts and evaluations from these on: a resumed run plays them again."""
        drop_records(self.journal.folder, first_rollout)
        for folder in set_folders(self.journal.folder):
            drop_records(folder, first_evaluation)

    def close(self) -> None:
        """Wait for the records, and close the receivers.

        Raises:
            OSError: records could not be written.
        """
        with ExitStack() as closing:
            closing.callback(self.display.close)
            for tracker in self.trackers:
                closing.callback(tracker.close)
            if self.records is not None:
                closing.callback(self.records.close)


def note_failures(journal: Journal, groups: Sequence[Group]) -> None:
    """Keep the first failure of each kind and place for good."""
    for trajectory in (t for group in groups for t in group.played):
        if trajectory.error is not None:
            journal.failure(trajectory.id, trajectory.error)


@dataclass(slots=True)
class Evaluated:
    """The last evaluation: its values, and after how many rollouts it was."""

    after: int = -1
    values: dict[str, float] = field(default_factory=dict)

    def state(self) -> JSON:
        return {"after": self.after, "values": self.values}

    def restore(self, state: JSON) -> None:
        self.after, self.values = state["after"], state["values"]


@dataclass(slots=True)
class RolloutRun:
    """The live objects of a reinforcement learning run."""

    num_rollouts: int
    seed: int
    rollouts: Rollouts | OwnRollouts
    recipe: Recipe
    learners: Learners
    publisher: Publisher
    evaluations: Sequence[EvaluationSet]
    evaluate_every: int | None
    evaluate_first: bool
    evaluated: Evaluated
    guard: RewardGuard
    checkpoint: RunState
    observer: Observer
    stop: Stop
    thread: Executor
    """Thread for torch work: off the event loop, so that tools and deadlines continue meanwhile."""
    on_rollout: Hook | None = None
    """`observe.on_rollout`."""
    sleep: Callable[[], Awaitable[None]] | None = None
    """Has the engine give its memory back until the next version; None: it keeps it."""
    engine_metrics: Callable[[], Metrics] = dict
    """Metrics of the engine itself."""

    async def compute(self, work: Callable[[], T]) -> T:
        """Run torch work, or what else takes long, on the torch thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    def evaluation_due(self, rollout_id: int) -> bool:
        if not self.evaluations or self.evaluated.after == rollout_id:
            return False
        return self.evaluate_first if rollout_id == 0 else due(rollout_id, self.num_rollouts, self.evaluate_every)

    def end_if_asked(self, progress: Progress) -> None:
        """Have the run end here if its watch said so."""
        if self.observer.is_ended:
            self.num_rollouts = progress.rollout_id

    def measured(self, rollout_id: int) -> dict[str, float]:
        """Evaluation results of the weights after `rollout_id` rollouts."""
        return self.evaluated.values if self.evaluated.after == rollout_id else {}


async def train_rl(run: RolloutRun) -> dict[str, float]:
    """Reinforcement learning: roll out, assign credit, update, publish; see `docs/architecture.md`.

    Returns:
        The values of the last evaluation.

    Raises:
        Stopped: if a signal asked for it. Like everything that fails between two updates, it loses nothing: the run is saved first.
    """
    collect_less()
    progress = run.checkpoint.resume()
    run.observer.forget(progress.rollout_id, run.evaluated.after + 1)
    phases = run.observer.phases
    await run.publisher.publish(progress.version)
    while True:
        async with between_updates(run, progress):
            await evaluate_if_due(run, progress)
        run.end_if_asked(progress)
        await save_if_due(run, progress)
        if progress.rollout_id >= run.num_rollouts:
            break
        async with between_updates(run, progress):
            run.guard.check()
            taken = await roll_out(run, progress)
            samples, left_out = await run.compute(lambda: run.recipe.samples(taken.groups, progress.version))  # noqa: B023
            batch = batch_of(samples)
            with phases.span("annotate"):
                batch = await run.compute(lambda: run.learners.annotate(batch))  # noqa: B023
            batch, credit = run.learners.algorithm.assign_credit(batch)
        with phases.span("update"):
            recorded = run.observer.records is not None and run.observer.records.due(progress.rollout_id)
            update = await run.compute(lambda: run.learners.update(batch, progress, per_token=recorded))  # noqa: B023
        phases.add_tokens("update", update.num_tokens)
        progress.rollout_id += 1
        progress.version += 1
        with phases.span("publish"):
            published = await run.publisher.publish(progress.version)
        run.rollouts.on_trained()
        found = {**merge_metrics(taken.metrics, left_out), **credit, **run.engine_metrics(), **published.metrics()}
        with phases.span("record"):
            proofs = run.publisher.proofs
            await run.compute(lambda: record(run, progress, taken, samples, batch, update, proofs))  # noqa: B023
        values = log_update(run, progress, taken, update, found)
        async with between_updates(run, progress):
            values |= await ask_further(run, progress, taken, values)
            run.observer.tell(progress.rollout_id, values)
            run.observer.replies(progress.rollout_id, taken.groups)
            warning = run.guard.see(taken.groups)
            if warning is not None:
                run.observer.display.warn(warning)
        run.end_if_asked(progress)
    return run.evaluated.values


@asynccontextmanager
async def between_updates(run: RolloutRun, progress: Progress) -> AsyncIterator[None]:
    """Context that saves the run if an error ends it in here. The weights do not change in here, so the
    run is saved as it was on entry. A failure before the first update leaves no checkpoint: nothing
    could be lost, and there is nothing to continue from."""
    algorithm = run.learners.algorithm
    parts: list[Stateful] = [RandomState()]
    if isinstance(algorithm, Stateful):
        parts.append(algorithm)
    kept = [(part, part.state()) for part in parts]
    try:
        yield
    except BaseException as error:
        for part, state in kept:
            part.restore(state)
        await run.rollouts.put_back()
        if progress != Progress() or isinstance(error, Stopped | KeyboardInterrupt):
            await save_at_the_end(run, progress)
        raise


async def save_at_the_end(run: RolloutRun, progress: Progress) -> None:
    """Save what is not saved yet. That it cannot be, on a full disk say, must not hide why the run ends."""
    try:
        with run.observer.phases.span("save"):
            folder = await saved(run, progress) or await run.compute(run.checkpoint.wait)
        if folder is not None:
            run.observer.display.note(f"saved after {progress.rollout_id} of {run.num_rollouts} rollouts: {folder}")
    except Exception as error:  # the run's own error follows
        run.observer.display_without_log.warn(f"the run cannot be saved as it ends: {error}")


async def save_if_due(run: RolloutRun, progress: Progress) -> None:
    """Save at the configured interval, at a new best, and at the end."""
    measured = run.measured(progress.rollout_id)
    if run.checkpoint.due(progress, run.num_rollouts, measured):
        with run.observer.phases.span("save"):
            if run.observer.records is not None:  # a run that goes on from this checkpoint plays none of them again
                await run.compute(run.observer.records.flush)
            await saved(run, progress)


async def saved(run: RolloutRun, progress: Progress) -> Path | None:
    """Save what is not saved yet: what changes while groups are played is read here, on the event loop, before anything is written."""
    state = run.checkpoint.read()
    return await run.compute(lambda: run.checkpoint.save(progress, run.measured(progress.rollout_id), state))


async def roll_out(run: RolloutRun, progress: Progress) -> RolloutResult:
    """The groups of the next rollout.

    Raises:
        RolloutFailed: if every trajectory failed, or every greedy one.
        Stopped: if a signal asked for it.
    """
    with run.observer.phases.span("rollout"):
        taken = await run.stop.unless(run.rollouts.take(progress))
        if run.sleep is not None:
            await run.sleep()
    groups = taken.groups
    run.observer.phases.add_tokens("rollout", sum(t.num_tokens_sampled for g in groups for t in g.played))
    run.observer.failures([*groups, *taken.dropped])
    require_valid(groups, f"rollout {progress.rollout_id}")
    return taken


def record(
    run: RolloutRun,
    progress: Progress,
    taken: RolloutResult,
    samples: Sequence[Sample],
    batch: TrainBatch,
    update: Update,
    proofs: Mapping[int, Proof],
) -> None:
    """Hand every token of the rollout before `progress` to the records' thread. Waits if that is too far behind.

    Raises:
        OSError: earlier records could not be written.
    """
    records, rollout_id = run.observer.records, progress.rollout_id - 1
    if records is not None and records.due(rollout_id):
        oldest = progress.version - 1 - run.recipe.max_staleness
        numbers = replace(numbers_of(batch, samples, update, oldest), proofs=proofs)
        records.write(rollout_id, [*taken.groups, *taken.dropped], samples, numbers)


def log_update(run: RolloutRun, progress: Progress, taken: RolloutResult, update: Update, found: Metrics) -> dict[str, float]:
    """Write the update's line of `metrics.jsonl`: from there on the update counts."""
    if not update.num_tokens:
        run.observer.display.warn(f"rollout {progress.rollout_id - 1} trained nothing: no valid trajectory has another to compare with")
    missing = unaccounted(found)
    if missing:
        run.observer.display.warn(
            f"rollout {progress.rollout_id - 1}: {missing} tokens that were sampled were neither trained nor dropped nor held; that is "
            "a fault of whet: please report it"
        )
    found |= {DROPPED: Total(num_dropped(found)), UNACCOUNTED: Total(missing)}
    counters = {"run/optimizer_step": float(progress.optimizer_step), "run/version": float(progress.version)}
    metrics = merge_metrics(merge_metrics(found, update.metrics), {name: Mean(value, 1) for name, value in counters.items()})
    return run.observer.log(progress.rollout_id, merge_metrics(rollout_metrics(taken.groups), metrics))


async def ask_further(run: RolloutRun, progress: Progress, taken: RolloutResult, values: Mapping[str, float]) -> dict[str, float]:
    """Metrics from `observe.on_rollout`, logged in a line of their own: the update's line is on disk
    even if the hook fails."""
    hook = run.on_rollout
    if hook is None:
        return {}
    further = await run.compute(lambda: further_metrics(hook, progress.rollout_id - 1, taken.groups, taken.dropped, values))
    if further:
        run.observer.trackers[0].log(progress.rollout_id, further)
    return further


async def evaluate_if_due(run: RolloutRun, progress: Progress) -> None:
    """Play every evaluation set, and log its results.

    Raises:
        Stopped: if a signal asked for it; the evaluation is then played again when the run continues.
    """
    if not run.evaluation_due(progress.rollout_id):
        return
    values: dict[str, float] = {}
    played: dict[str, Sequence[Group]] = {}
    for chosen in run.evaluations:
        with run.observer.phases.span("evaluate"):
            async with run.rollouts.engine_awake():
                groups = await run.stop.unless(chosen.play(run.seed))
        run.observer.failures(groups)
        played[chosen.name] = groups
        values.update(flatten(chosen.summarise(progress.rollout_id, groups, run.publisher.proofs)))
    run.observer.trackers[0].log(progress.rollout_id, values)
    run.evaluated.after, run.evaluated.values = progress.rollout_id, values
    best = run.checkpoint.best
    if best is not None and best not in values:
        run.observer.display.warn(f"checkpoint.best is {best}, which no evaluation measures; they measure {', '.join(values)}")
    for tracker in run.observer.trackers[1:]:
        tracker.log(progress.rollout_id, values)
    for chosen in run.evaluations:
        prefix = f"eval/{chosen.name}/"
        rows = [(key.removeprefix(prefix), value) for key, value in values.items() if key.startswith(prefix)]
        run.observer.display.table(f"evaluation {chosen.name} after {progress.rollout_id} rollouts", ("metric", "value"), rows)
        run.observer.replies(progress.rollout_id, played[chosen.name], f"replies/{chosen.name}")
    run.observer.evaluated(progress.rollout_id, values)
