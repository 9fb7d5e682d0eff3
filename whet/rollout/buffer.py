"""Every task that the source gave and the trainer has not learned from: waiting, being played, ready or
taken.

A task is in one of these places only. All of them are in the checkpointed state, so no task is lost or
comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from whet.data.source import Source
from whet.rollout.group_run import GroupRun
from whet.rollout.order import Order, ordered, start_order
from whet.types import JSON, Group


class FilteredGroup(NamedTuple):
    """A group that a filter dropped, kept for a rollout that does not become full without it."""

    group_run: GroupRun
    group: Group
    reason: str


@dataclass(slots=True)
class Buffer:
    """Groups between the source and the trainer.

    Args:
        num_samples: trajectories of each group.
        baseline: True if each task is played greedily, too.
    """

    num_samples: int
    baseline: bool
    waiting: list[GroupRun] = field(default_factory=list[GroupRun])
    """Groups to begin before any new task, in order."""
    playing: list[GroupRun] = field(default_factory=list[GroupRun])
    ready: list[GroupRun] = field(default_factory=list[GroupRun])
    taken: list[GroupRun] = field(default_factory=list[GroupRun])
    fallbacks: list[FilteredGroup] = field(default_factory=list[FilteredGroup])
    """Without refills: groups of the current rollout that filters dropped."""
    num_started: int = 0

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all groups but the taken ones."""
        groups = (*self.waiting, *self.playing, *self.ready, *(each.group_run for each in self.fallbacks))
        return sum(group_run.num_tokens for group_run in groups)

    def next(self, source: Source) -> GroupRun:
        """The group to begin now.

        Raises:
            ValueError: if the source gives a task that is in the buffer already.
        """
        if self.waiting:
            return self.waiting.pop(0)
        (task,) = source.next(1)
        if task.id in (group_run.task.id for group_runs in (self.playing, self.ready, self.taken) for group_run in group_runs):
            raise ValueError(f"the source gave the task {task.id!r} while it is being played; no two tasks of a run may have one id")
        self.num_started += 1
        return GroupRun(task, self.num_started - 1, self.num_samples, self.baseline)

    def wait(self, group_run: GroupRun) -> None:
        self.waiting = sorted([*self.waiting, group_run], key=start_order)

    def choose(self, num: int, order: Order | None) -> None:
        """Take the first `num` ready groups, by the start of their play or by `order`."""
        ready = sorted(self.ready, key=start_order)
        if order is not None:
            ready = ordered(ready, order)
        self.taken, self.ready = ready[:num], ready[num:]

    def put_back(self) -> None:
        """Return the taken groups to the ready ones."""
        self.ready = sorted([*self.taken, *self.ready], key=start_order)
        self.taken = []

    def forget_fallbacks(self) -> None:
        """Discard the groups that filters dropped; their tasks wait to be played again."""
        for group_run, _, _ in self.fallbacks:
            self.wait(group_run)
        self.fallbacks.clear()

    def take_fallbacks(self, num: int) -> list[FilteredGroup]:
        """Remove and return the first `num` groups that filters dropped, by the start of their play."""
        self.fallbacks.sort(key=lambda each: each.group_run.index)
        chosen, self.fallbacks = self.fallbacks[:num], self.fallbacks[num:]
        return chosen

    def older_than(self, version: int) -> list[GroupRun]:
        """Remove and return the ready groups whose newest token is older than `version`.

        A group stays if a trajectory of it used up its time: it would do so again, and be as old then.
        """
        old = [each for each in self.ready if each.newest is not None and each.newest < version and not each.used_up_its_time]
        self.ready = [group_run for group_run in self.ready if group_run not in old]
        return old

    def state(self, *, resumable: bool) -> JSON:
        """State of every task in the buffer, each as `GroupRun.state`."""
        fallbacks = [each.group_run for each in self.fallbacks]
        group_runs = sorted([*self.waiting, *self.playing, *self.ready, *self.taken, *fallbacks], key=start_order)
        return {"num_started": self.num_started, "group_runs": [group_run.state(resumable) for group_run in group_runs]}

    def restore(self, state: JSON, source: Source) -> None:
        """Raises ValueError if the source has no such task."""
        group_runs = [GroupRun.restored(each, source.find, self.num_samples, self.baseline) for each in state["group_runs"]]
        self.num_started = state["num_started"]
        self.ready = [group_run for group_run in group_runs if group_run.judged]
        self.waiting = [group_run for group_run in group_runs if not group_run.judged]

    def restart_all(self) -> None:
        """Discard everything that was played: all tasks of the buffer wait."""
        assert not self.playing and not self.taken and not self.fallbacks, "something is under way"
        self.waiting, self.ready = sorted([*self.waiting, *self.ready], key=start_order), []
        for group_run in self.waiting:
            group_run.forget()
