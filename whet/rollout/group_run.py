"""The group of one task: its trajectories that have ended, that were interrupted, and that are being played."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from whet.data.source import task_digest
from whet.engine.base import Engine, EngineFailed
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.rollout.runner import GREEDY, trajectory_id
from whet.types import JSON, Group, Outcome, Task, Trajectory
from whet.types.json_codec import trajectory_from_json, trajectory_to_json

ABORT_GRACE_S = 5.0
"""For the engine to hand over what it sampled of a trajectory that is cut off."""
ABORT_AGAIN_S = 0.05
"""Until the engine is asked again: a request may just have been on its way to it."""


@dataclass(slots=True, eq=False)
class GroupRun:
    """The group of one task, from its start until it is trained on."""

    task: Task
    index: int
    """Number of groups that were started before this one, over the whole run."""
    num_samples: int
    baseline: bool
    """True if the group has a greedy trajectory, too."""
    started: int | None = None
    """Version of the policy when it was started, before any interruption; None: it was not."""
    ended: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    """Trajectories that ended, by id."""
    interrupted: dict[str, Trajectory] = field(default_factory=dict[str, Trajectory])
    """Interrupted trajectories, by id; each continues from its last token."""
    runs: dict[str, TrajectoryRun] = field(default_factory=dict[str, TrajectoryRun])
    """Trajectories being played, by id. A run that continues an entry of `interrupted` contains its turns."""
    jobs: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, "asyncio.Task[None]"])
    resources: Resources | None = None
    """Resources that its trajectories share; None: it is not being played."""
    withdrawn: bool = False
    """The group is being interrupted."""
    judged: bool = False
    """The rewards are final, and no filter dropped it."""
    newest: int | None = None
    """Version that sampled the newest token of a judged group's siblings; None: they have no tokens."""
    scored_together: bool = False
    """Siblings of a judged group got their rewards together, so none of them can be judged with others
    later."""

    @property
    def ids(self) -> list[str]:
        """Ids of all its trajectories, the greedy one last."""
        ids = [trajectory_id(self.task, k) for k in range(self.num_samples)]
        return [*ids, trajectory_id(self.task, GREEDY)] if self.baseline else ids

    @property
    def whole(self) -> bool:
        return len(self.ended) == self.num_samples + self.baseline

    @property
    def used_up_its_time(self) -> bool:
        """True if a trajectory ended when its time was over."""
        return any(t.outcome is Outcome.TIMEOUT for t in self.ended.values())

    @property
    def there(self) -> Iterator[Trajectory]:
        """All its trajectories: ended, being played or interrupted, each with its tokens so far."""
        yield from self.ended.values()
        yield from (run.so_far() for run in self.runs.values())
        yield from (t for id, t in self.interrupted.items() if id not in self.runs)

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled for its trajectories so far."""
        still = [t for id, t in self.interrupted.items() if id not in self.runs]
        return sum(t.num_tokens_played for t in (*self.ended.values(), *still)) + sum(run.num_tokens for run in self.runs.values())

    @property
    def oldest(self) -> int | None:
        """Version that sampled its oldest token; None: it has no tokens."""
        trajectories = chain(self.ended.values(), (t for id, t in self.interrupted.items() if id not in self.runs))
        found = chain((t.oldest for t in trajectories), (run.oldest for run in self.runs.values()))
        return min((version for version in found if version is not None), default=None)

    def group(self) -> Group:
        *siblings, last = [self.ended[id] for id in self.ids]
        return Group(self.task, tuple(siblings), last) if self.baseline else Group(self.task, (*siblings, last))

    async def close_resources(self) -> None:
        """Close the resources of its trajectories, which have ended or been interrupted."""
        if self.resources is not None:
            await self.resources.aclose()

    def take_over(self, group: Group) -> None:
        """Its trajectories as they were judged."""
        self.scored_together = any(self.ended[t.id] is not t for t in group.played)
        self.ended = {t.id: t for t in group.played}
        self.judged = True
        self.newest = max((v for t in group.trajectories for turn in t.turns for v in turn.versions.values), default=None)

    def forget(self) -> None:
        """Discard all trajectories, so that the group restarts."""
        assert not self.jobs, "it is being played"
        self.ended.clear()
        self.interrupted.clear()
        self.judged, self.withdrawn, self.newest, self.scored_together, self.started = False, False, None, False, None

    def state(self, resumable: bool) -> JSON:
        """As JSON: the task's id, and of its trajectories those that need not be played again.

        What failed is played again: what made it fail may have been mended. So is what JSON cannot hold, and what is cut off where
        `resumable` is false.
        """
        failed = any(not t.outcome.valid for t in self.ended.values())
        ended = [] if failed and self.scored_together else [t for t in self.ended.values() if t.outcome.valid]
        known = [state for t in ended if (state := trajectory_state(t)) is not None]
        unfinished = [run.so_far() for run in self.runs.values()] + [t for id, t in self.interrupted.items() if id not in self.runs]
        cut = [state for t in unfinished if resumable and t.turns and (state := trajectory_state(t)) is not None]
        judged = self.judged and len(known) == len(self.ended)
        row = task_digest(self.task).hex()
        own = {"task": self.task.id, "row": row, "index": self.index, "started": self.started}
        return {**own, "judged": judged, "ended": known, "interrupted": cut}

    @classmethod
    def restored(cls, state: JSON, find: Callable[[str], Task], num_samples: int, baseline: bool) -> GroupRun:
        """The group that `state` describes. If the task's row was corrected since, the group restarts."""
        group_run = cls(find(state["task"]), state["index"], num_samples, baseline)
        if state["row"] != task_digest(group_run.task).hex():
            return group_run
        group_run.started = state.get("started")  # checkpoints of earlier versions have none
        ids = set(group_run.ids)
        for name, into in (("ended", group_run.ended), ("interrupted", group_run.interrupted)):
            into.update({t.id: t for t in map(trajectory_from_json, state[name]) if t.id in ids})
        if state["judged"] and group_run.whole:
            group_run.take_over(group_run.group())
        return group_run


async def interrupt(group_runs: Sequence[GroupRun], engine: Engine) -> None:
    """End every trajectory of groups that are being played: the engine hands over the tokens that it sampled, and every other wait is
    cancelled."""
    clock = asyncio.get_running_loop().time
    deadline, cancelled = clock() + ABORT_GRACE_S, set[str]()

    def under_way() -> list[tuple[GroupRun, str]]:
        return [(group_run, id) for group_run in group_runs for id, job in group_run.jobs.items() if not job.done()]

    while (left := under_way()) and clock() < deadline:
        for group_run, id in left:
            run = group_run.runs.get(id)
            if run is not None and run.request and id not in cancelled:
                with suppress(EngineFailed, TimeoutError):  # an engine that is gone or hangs: the trajectory is cancelled below
                    async with asyncio.timeout_at(deadline):
                        await engine.abort(run.request)
            elif id not in cancelled:  # once: a second time would break off the closing of its environment
                cancelled.add(id)
                group_run.jobs[id].cancel()
        await asyncio.wait([group_run.jobs[id] for group_run, id in left], timeout=ABORT_AGAIN_S)
    for group_run, id in under_way():
        if id not in cancelled:
            group_run.jobs[id].cancel()
    await asyncio.gather(*(job for group_run in group_runs for job in group_run.jobs.values()), return_exceptions=True)


def trajectory_state(trajectory: Trajectory) -> JSON | None:
    """A trajectory as JSON, None if JSON cannot hold it."""
    state = trajectory_to_json(trajectory)
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        return None
    return state


def group_state(group: Group) -> JSON:
    """A dropped group as JSON, without what JSON cannot hold of it."""
    siblings = [state for t in group.trajectories if (state := trajectory_state(t)) is not None]
    greedy = None if group.baseline is None else trajectory_state(group.baseline)
    return {"task": group.task.id, "trajectories": siblings, "baseline": greedy, "dropped": group.dropped}


def group_restored(state: JSON, find: Callable[[str], Task]) -> Group:
    """From what `group_state` gave."""
    siblings = tuple(map(trajectory_from_json, state["trajectories"]))
    greedy = None if state["baseline"] is None else trajectory_from_json(state["baseline"])
    return Group(find(state["task"]), siblings, greedy, state["dropped"])
