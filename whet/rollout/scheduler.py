"""Scheduling of groups: they are started while there is room, judged as they finish, and handed over when
a rollout is full."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from whet.data.source import Source
from whet.env.deadline import Pauses
from whet.env.rollout import TokenCount
from whet.observe.metrics import Metrics, Total
from whet.rollout.buffer import Buffer, FilteredGroup
from whet.rollout.control import ControlConfig
from whet.rollout.filters import Selection
from whet.rollout.group_run import GroupRun, interrupt
from whet.rollout.metrics import RolloutFailed
from whet.rollout.order import start_order
from whet.rollout.runner import TrajectoryRunner, TrajectorySpec
from whet.rollout.stats import RolloutStats
from whet.rollout.token_account import CARRIED, HELD, SAMPLED
from whet.types import JSON, Group, Outcome, Progress, Trajectory

RETRIED = (Outcome.ABORTED, Outcome.ENV_ERROR, Outcome.REWARD_ERROR, Outcome.TIMEOUT)
"""Outcomes after which a trajectory may be played again. A refused one would be refused again."""


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """Result of a rollout."""

    groups: list[Group]
    dropped: list[Group]
    """Other groups played since the last rollout, which are not trained on, each with its reason: filtered, left over or too old."""
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Size of a rollout."""

    groups: int
    samples_per_prompt: int
    baseline: bool = False
    """Play each task greedily, too."""


class Rollouts:
    """Groups on their way from the source to the trainer.

    Args:
        source: source of tasks.
        runner: plays them.
        control: limits of the groups in flight, and rules for keeping them.
        wanted: size of a rollout.
        num_rollouts: rollouts of the whole run; no group is started that none of them would take.
        seed: seed of the sampling.
        selection: which of the finished groups train, and first.
        played_by: names the settings and the code that say what a trajectory becomes. Groups played by others are restarted.
    """

    def __init__(
        self,
        source: Source,
        runner: TrajectoryRunner,
        control: ControlConfig,
        wanted: RolloutSpec,
        num_rollouts: int,
        seed: int,
        selection: Selection = Selection(),  # noqa: B008
        played_by: str = "",
    ) -> None:
        self._source, self._control, self._wanted, self._seed = source, control, wanted, seed
        self._runner = replace(runner, sampled=TokenCount())
        self._played_by = played_by
        self._num_rollouts = num_rollouts
        self._resumable = runner.resumable
        self._selection = selection
        self._buffer = Buffer(wanted.samples_per_prompt, wanted.baseline)
        self._num_left = 0
        """Groups that the trainer takes from the present rollout on."""
        self._version = 0
        self._taking = False
        self._entry: tuple[JSON, JSON] | None = None
        """In deterministic mode, what was before the rollout under way: source and self."""
        self._fault: BaseException | None = None
        self._scored: dict[GroupRun, Group] = {}
        """Groups that have ended, as they were scored; no filter has seen them yet."""
        self._stats = RolloutStats()
        self._num_sampled = self._num_held = 0
        """Tokens sampled, and held, when the last rollout was taken."""
        self._pauses = Pauses()
        self._changed: asyncio.Event = asyncio.Event()
        self._slots: asyncio.Semaphore = runner.slots()

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Trajectories being played, a line each. May be called on any thread."""
        return tuple(f"trajectory {id}" for group_run in list(self._buffer.playing) for id in list(group_run.runs))

    async def take(self, progress: Progress) -> RolloutResult:
        """The groups of the next rollout, for the policy of the present version, which the engine holds.

        They count as not learned from until `on_trained`; `put_back` returns them.

        Raises:
            RolloutFailed: too many trajectories failed, or no group passed the filters.
            LabelError, Stalled: as for `TrajectoryRunner.play`.
        """
        assert not self._buffer.taken, "the last rollout was neither learned from nor put back"
        self._version, self._taking = progress.version, True
        self._num_left = (self._num_rollouts - progress.rollout_id) * self._wanted.groups
        if self._runner.deterministic:
            self._entry = self._source.state(), self.state()
        await self._restart_aged(progress.version)
        await self._resume()
        try:
            while True:
                self._expire(self._version, "too_old")
                self._fill()
                self._use_fallbacks()
                if self._fault is not None:
                    raise self._fault
                if self._full:
                    break
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._taking = False
        self._buffer.choose(self._wanted.groups, self._selection.order)
        for _, group, reason in self._buffer.fallbacks:
            self._stats.dropped(group, reason)
        self._buffer.fallbacks.clear()
        if not self._control.overlaps:
            await (self._pause() if self._control.partial else self._withdraw(self._buffer.playing, "left_over"))
            self._expire(self._version + 1, "left_over")
        groups = [group_run.group() for group_run in self._buffer.taken]
        busy_s = await self._runner.engine.busy_s()
        self._stats.busy(busy_s)
        dropped, metrics = self._stats.take(num_ready=len(self._buffer.ready), num_playing=len(self._buffer.playing))
        metrics["rollout/tokens"] = Total(sum(t.num_tokens_sampled for group in groups for t in group.played))
        metrics |= self._flow()
        return RolloutResult(groups, dropped, metrics)

    def _flow(self) -> Metrics:
        """Tokens sampled since the last rollout was taken, held then, and held now."""
        sampled, carried = self._runner.sampled.total - self._num_sampled, self._num_held
        self._num_sampled, self._num_held = self._runner.sampled.total, self._buffer.num_tokens
        return {SAMPLED: Total(sampled), CARRIED: Total(carried), HELD: Total(self._num_held)}

    def on_trained(self) -> None:
        """Forget the taken groups: the trainer has learned from them, and the engine has the new
        version. Groups started from now on are one version younger."""
        self._num_left -= len(self._buffer.taken)
        self._buffer.taken.clear()
        self._entry = None

    async def put_back(self) -> None:
        """End everything in flight, so that the state can be saved; all that can be kept is kept.

        Groups that were taken and not trained on can be taken again. In deterministic mode the state
        becomes that before the rollout.
        """
        await self.close()
        if self._entry is not None:
            source, own = self._entry
            self._source.restore(source)
            self.restore(own)
            self._entry = None
        else:
            self._num_held += sum(group_run.num_tokens for group_run in self._buffer.taken)
            self._buffer.put_back()

    async def close(self) -> None:
        """End everything in flight, without reporting failures."""
        await self._withdraw(self._buffer.playing, None)
        self._scored.clear()
        self._buffer.forget_fallbacks()
        self._fault = None

    def state(self) -> JSON:
        """State of every task taken from the source and not yet trained on. In deterministic mode no
        group may be in flight."""
        return {**self._buffer.state(resumable=self._resumable), "stats": self._stats.state(), "played_by": self._played_by}

    def restore(self, state: JSON) -> None:
        """Raises ValueError if the source has no such task, or the state is not a scheduler's."""
        if not isinstance(state, dict):
            raise ValueError("the checkpoint was made with a control.rollout; go on with that, or start a new run_dir")
        self._buffer = Buffer(self._wanted.samples_per_prompt, self._wanted.baseline)
        self._buffer.restore(state, self._source)
        if state["played_by"] != self._played_by:
            self._buffer.restart_all()
        self._stats = RolloutStats.restored(state["stats"], self._source.find)
        self._num_sampled, self._num_held = self._runner.sampled.total, self._buffer.num_tokens + self._stats.num_tokens

    # Starting.

    def _fill(self) -> None:
        """Begin as many groups as there is room for."""
        if self._fault is not None:
            return
        try:
            for _ in range(self._room()):
                self._start(self._buffer.next(self._source))
        except Exception as error:  # a source of the user's; the next `take` raises it
            self._fault = error

    def _room(self) -> int:
        """Number of groups that may be started now."""
        control, playing = self._control, len(self._buffer.playing)
        if control.overlaps:  # what is started now is trained on after all that is under way, each update making one version
            bound = min((control.max_staleness + 1) * self._wanted.groups, self._num_left + self._num_late)
            room = bound - playing - len(self._buffer.ready) - len(self._buffer.taken)
        elif not self._taking or (self._runner.deterministic and playing):
            return 0  # what is started, and so which bits, must not depend on which group was the first to end
        else:
            room = self._lacking
        return max(0, room if control.max_groups is None else min(room, control.max_groups - playing))

    @property
    def _num_late(self) -> int:
        """Groups being played for so long that the last rollouts do without them: twice as long as tokens stay young enough, since tasks
        that are merely slow are to keep their share."""
        limit = self._version - 2 * self._control.max_staleness
        return sum(group_run.started is not None and group_run.started < limit for group_run in self._buffer.playing)

    @property
    def _lacking(self) -> int:
        """Number of groups still to begin for this rollout, now or when there is room. Without overlap
        only."""
        control, num_ready = self._control, len(self._buffer.ready)
        if control.refill:
            wanted = math.ceil((self._wanted.groups - num_ready) * control.over_sample)
        else:  # a fixed number of groups, whether or not filters drop them
            wanted = math.ceil(self._wanted.groups * control.over_sample) - num_ready - len(self._buffer.fallbacks)
        return max(0, wanted - len(self._buffer.playing))

    def _start(self, group_run: GroupRun) -> None:
        self._buffer.playing.append(group_run)
        if group_run.started is None:
            group_run.started = self._version
        group_run.resources = self._runner.resources.of_group(group_run.task)
        specs = self._runner.specs(group_run.task, group_run.index, group_run.num_samples, self._seed, group_run.baseline)
        todo = [spec for spec in specs if spec.id not in group_run.ended]
        if not todo:
            group_run.jobs[group_run.task.id] = asyncio.create_task(self._finish(group_run), name=f"rollout {group_run.task.id}")
        for spec in todo:
            group_run.jobs[spec.id] = asyncio.create_task(self._run_trajectory(group_run, spec), name=f"rollout {spec.id}")

    # Playing.

    async def _run_trajectory(self, group_run: GroupRun, spec: TrajectorySpec) -> None:
        try:
            trajectory = await self._run_with_retries(group_run, spec)
        except Exception as error:  # the next `take` raises it
            self._fault = self._fault or error
            self._changed.set()
            return
        if spec.id in group_run.interrupted:  # cut off: it goes on from there another time
            return
        group_run.ended[spec.id] = trajectory
        self._stats.ended(trajectory)
        if group_run.whole and not group_run.withdrawn:
            await self._finish(group_run)

    async def _run_with_retries(self, group_run: GroupRun, spec: TrajectorySpec) -> Trajectory:
        """Play a trajectory, and play it again if it failed and a retry is allowed."""
        num_retries = 0
        while True:
            async with self._slots:
                earlier = group_run.interrupted.pop(spec.id, None)
                if earlier is not None and not self._resumable:
                    self._stats.restarted(earlier)
                    earlier = None
                run = group_run.runs[spec.id] = self._runner.begin(spec, earlier, self._pauses)
                try:
                    trajectory = await self._runner.finish(run, group_run.resources)
                    if group_run.withdrawn and not trajectory.outcome.valid:
                        group_run.interrupted[spec.id] = run.so_far()
                except asyncio.CancelledError:
                    group_run.interrupted[spec.id] = run.so_far()
                    raise
                finally:
                    del group_run.runs[spec.id]
            last = num_retries == self._control.retries or group_run.withdrawn or trajectory.outcome not in RETRIED
            if last or not self._stats.may_retry(trajectory, self._control.retry_budget):
                return trajectory
            num_retries += 1

    async def _finish(self, group_run: GroupRun) -> None:
        """Score the ended trajectories of a group together, and keep or drop the group."""
        try:
            await group_run.close_resources()
            group = await self._runner.judge(group_run.group())
            if group_run.withdrawn:  # while its siblings were scored: it is finished another time
                return
            self._stats.spoilt(group_run.group(), group)
            group_run.jobs.clear()
            self._scored[group_run] = group
            if not self._runner.deterministic or len(self._scored) == len(self._buffer.playing):
                self._settle()
        except Exception as error:  # a filter failed
            self._fault = self._fault or error
        self._changed.set()
        if self._control.overlaps and not self._taking:
            self._fill()

    def _settle(self) -> None:
        """Keep or drop the scored groups, in the order of their start. In deterministic mode all have
        ended by now, so the result does not depend on which ended first."""
        scored = sorted(self._scored.items(), key=lambda each: start_order(each[0]))
        self._scored.clear()
        for group_run, group in scored:
            reason = next((reason for keep in self._selection.filters if (reason := keep(group)) is not None), None)
            self._buffer.playing.remove(group_run)
            if reason is None:
                self._keep(group_run, group)
            elif self._control.refill:
                self._judged(group, reason)
            else:
                self._buffer.fallbacks.append(FilteredGroup(group_run, group, reason))

    def _keep(self, group_run: GroupRun, group: Group) -> None:
        group_run.take_over(group)
        self._buffer.ready.append(group_run)
        self._judged(group, None)

    def _use_fallbacks(self) -> None:
        """Keep dropped groups after all if the groups in flight cannot fill the rollout."""
        buffer = self._buffer
        missing = max(0, self._wanted.groups - len(buffer.ready) - len(buffer.playing) - self._lacking)
        for group_run, group, _ in buffer.take_fallbacks(missing):
            self._stats.num_called_in += 1
            self._keep(group_run, group)

    def _judged(self, group: Group, reason: str | None) -> None:
        try:
            self._stats.judged(group, reason, self._wanted.groups, self._control)
        except RolloutFailed as failed:  # the next `take` raises it
            self._fault = self._fault or failed

    # Handing over.

    @property
    def _full(self) -> bool:
        return len(self._buffer.ready) >= self._wanted.groups and not (self._runner.deterministic and self._buffer.playing)

    def _expire(self, version: int, reason: str) -> None:
        """Restart ready groups whose tokens are all too old to be trained on at this version."""
        for group_run in self._buffer.older_than(version - self._control.max_staleness):
            self._stats.dropped(group_run.group(), reason)
            group_run.forget()
            self._buffer.wait(group_run)

    async def _restart_aged(self, version: int) -> None:
        """Restart unfinished groups that were started too many versions ago."""
        limit = self._control.max_partial_age
        if limit is None:
            return

        def aged(group_runs: Sequence[GroupRun]) -> list[GroupRun]:
            return [group_run for group_run in group_runs if group_run.oldest is not None and version - group_run.oldest > limit]

        await self._withdraw(aged(self._buffer.playing), "too_old")
        for group_run in aged(self._buffer.waiting):
            self._stats.cut(group_run, "too_old")
            group_run.forget()

    # Pausing.

    @asynccontextmanager
    async def engine_awake(self) -> AsyncIterator[None]:
        """Resume the paused engine while another caller samples; paused groups continue, too."""
        was_paused = self._pauses.began is not None
        await self._resume()
        try:
            yield
        finally:
            if was_paused:
                await self._pause()

    async def _resume(self) -> None:
        if self._pauses.began is not None:
            self._pauses.end()
            await self._runner.engine.resume()

    async def _pause(self) -> None:
        """Pause sampling until the next rollout; running tools and rewards continue."""
        self._pauses.begin()
        await self._runner.engine.pause()

    async def _withdraw(self, group_runs: Sequence[GroupRun], reason: str | None) -> None:
        """Interrupt groups; their tasks wait and come first. With a reason the groups restart later,
        otherwise they continue from their tokens so far."""
        group_runs = list(group_runs)
        for group_run in group_runs:
            group_run.withdrawn = True
        await interrupt(group_runs, self._runner.engine)
        await asyncio.gather(*(group_run.close_resources() for group_run in group_runs))
        for group_run in group_runs:
            group_run.jobs.clear()
            group_run.withdrawn = False
            if group_run not in self._buffer.playing:  # it was judged meanwhile
                continue
            self._buffer.playing.remove(group_run)
            if reason is not None:
                self._stats.cut(group_run, reason)
                group_run.forget()
            self._buffer.wait(group_run)
