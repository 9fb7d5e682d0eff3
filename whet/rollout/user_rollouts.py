"""Rollouts that a function of the user's plays in place of the scheduler."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from whet.config import Hook
from whet.data.source import Source
from whet.env.rollout import TokenCount
from whet.observe.metrics import Total
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.scheduler import RolloutResult, RolloutSpec
from whet.rollout.stats import RolloutStats
from whet.rollout.token_account import CARRIED, HELD, SAMPLED
from whet.types import JSON, UNSAMPLED, Group, Progress, Trajectory


@dataclass(frozen=True, slots=True)
class Ask:
    """The request for a rollout, and the means to play it."""

    source: Source
    """Source of the tasks. The run keeps its cursor: a rollout that does not end leaves the cursor
    where it was before."""
    runner: TrajectoryRunner
    """Plays tasks: `play` whole groups, or `begin` and `finish` single trajectories."""
    wanted: RolloutSpec
    progress: Progress
    """`version` is what the engine holds. A copy."""
    seed: int
    """Seed of the run, for `runner.play`."""


@runtime_checkable
class Remembers(Protocol):
    """A rollout function with its own state, such as tasks that it took from the source and has not
    returned."""

    def state(self) -> JSON: ...

    def restore(self, state: JSON) -> None: ...


@runtime_checkable
class Closes(Protocol):
    """A rollout that lets go of something as the run ends."""

    async def close(self) -> None: ...


class OwnRollouts:
    """The rollouts of a user's function, with the members of `scheduler.Rollouts`.

    What a rollout that is stopped or fails had taken from the source is given again: source and state are put back to where they were
    before it. What one that ended took and did not return is in its state, if it has one, and gone otherwise.

    Args:
        hook: `control.rollout`, an async function of an `Ask` that returns groups.
        source: source of tasks.
        runner: plays them.
        wanted: size of a rollout.
        seed: seed of the sampling.
    """

    def __init__(self, hook: Hook, source: Source, runner: TrajectoryRunner, wanted: RolloutSpec, seed: int) -> None:
        self._hook, self._source, self._wanted, self._seed = hook, source, wanted, seed
        self._runner = replace(runner, sampled=TokenCount())
        self._num_sampled = self._num_held = 0
        """Tokens sampled when the last rollout was taken, and those of them that no rollout had returned."""
        self._entry: tuple[JSON, JSON] | None = None
        """Source and state before the rollout that is under way, or not learned from yet."""

    in_flight: tuple[str, ...] = ()
    """Between two rollouts nothing is played."""

    async def take(self, progress: Progress) -> RolloutResult:
        """The groups of the next rollout: those that it returned without a reason to drop them.

        Raises:
            HookFailed: the function raised, or returned something else than what was asked for.
            RolloutFailed, LabelError, Stalled: as whet raised it in there.
        """
        self._entry = json.dumps(self._source.state()), self.state()
        ask = Ask(self._source, self._runner, self._wanted, replace(progress), self._seed)
        groups = _checked(self._hook, await self._hook.wait_for(ask), ask)
        stats = RolloutStats()
        kept = [group for group in groups if group.dropped is None]
        stats.num_kept = len(kept)
        for group in groups:
            if group.dropped is not None:
                stats.dropped(group, group.dropped)
        dropped, metrics = stats.take(num_ready=0, num_playing=0)
        sampled, carried = self._runner.sampled.total - self._num_sampled, self._num_held
        self._num_sampled += sampled
        held = carried + sampled - sum(t.num_tokens_played for group in groups for t in group.played)
        carried, self._num_held = carried - min(0, held), max(0, held)  # more than was sampled: of its state, from an earlier start
        metrics |= {SAMPLED: Total(sampled), CARRIED: Total(carried), HELD: Total(self._num_held)}
        return RolloutResult(kept, dropped, metrics)

    def on_trained(self) -> None:
        """Forget the rollout's entry state: the trainer has learned from the taken groups."""
        self._entry = None

    async def put_back(self) -> None:
        """All is as it was before a rollout that was not learned from."""
        if self._entry is not None:
            (source, own), self._entry = self._entry, None
            self._source.restore(json.loads(source))
            self.restore(own)

    async def close(self) -> None:
        """The run ends."""
        if isinstance(self._hook.function, Closes):
            await self._hook.at(self._hook.function.close).wait_for()

    @asynccontextmanager
    async def engine_awake(self) -> AsyncIterator[None]:
        """Keep the engine awake for another caller. It is never paused here."""
        yield

    def state(self) -> JSON:
        """The function's own, as text; None if it has none."""
        own = self._hook.function
        if not isinstance(own, Remembers):
            return None
        state = self._hook.at(own.state)()
        try:
            return json.dumps(state)
        except (TypeError, ValueError) as error:
            raise self._hook.refused(f"has a state that is not JSON: {error}") from error

    def restore(self, state: JSON) -> None:
        """Raises ValueError if it is of another function."""
        own = self._hook.function
        if type(state) is not (str if isinstance(own, Remembers) else type(None)):
            what = f"control.rollout = {self._hook.reference!r}: what the checkpoint holds is not its state"
            raise ValueError(f"{what}; go on with the control.rollout of that run, or start a new run_dir")
        if isinstance(own, Remembers):
            assert isinstance(state, str)
            self._hook.at(own.restore)(json.loads(state))


def _checked(hook: Hook, groups: object, ask: Ask) -> list[Group]:
    """The groups that a function returned, checked against the request."""
    if not isinstance(groups, Sequence) or not all(isinstance(group, Group) for group in groups):
        raise hook.refused(f"returned {type(groups).__name__}; return a list of groups")
    found: list[Group] = list(groups)
    kept = [group for group in found if group.dropped is None]
    if len(kept) != ask.wanted.groups:
        raise hook.refused(f"returned {len(kept)} groups to train on, but {ask.wanted.groups} are wanted (batch.prompts_per_rollout)")
    names = [t.id for group in kept for t in group.played]
    tasks = [group.task.id for group in kept]
    for what, ids in (("tasks", tasks), ("trajectories", names)):
        twice = next((name for name in ids if ids.count(name) > 1), None) if len(set(ids)) < len(ids) else None
        if twice is not None:
            raise hook.refused(f"returned two {what} with the id {twice!r}; each must have its own")
    for group in kept:
        _check_group(hook, group, ask)
    return found


def _check_group(hook: Hook, group: Group, ask: Ask) -> None:
    num, wanted = len(group.trajectories), ask.wanted
    if num != wanted.samples_per_prompt:
        raise hook.refused(f"returned {num} trajectories of task {group.task.id!r}; {wanted.samples_per_prompt} are wanted")
    if (group.baseline is not None) != wanted.baseline:
        there = "no greedy trajectory" if wanted.baseline else "a greedy trajectory, which the algorithm does not ask for,"
        raise hook.refused(f"returned {there} of task {group.task.id!r}")
    for trajectory in group.played:
        why = _odd(trajectory, group, ask.progress.version)
        if why:
            raise hook.refused(f"returned the trajectory {trajectory.id!r}, {why}")


def _odd(trajectory: Trajectory, group: Group, version: int) -> str:
    """Description of the fault in a trajectory; "": it has none."""
    if trajectory.task.id != group.task.id:
        return f"which is of task {trajectory.task.id!r}, not of its group's {group.task.id!r}"
    if trajectory.outcome.valid and trajectory.rewards is None:
        return f"which ended as {trajectory.outcome.value} and has no rewards; let the runner finish and judge it"
    versions = {v for turn in trajectory.turns for v in turn.versions.values}
    if any(v == UNSAMPLED or v > version for v in versions):
        return f"with tokens of versions {sorted(versions)}; the engine has sampled 0 to {version}"
    return ""
