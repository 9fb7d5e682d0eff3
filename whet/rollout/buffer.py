"""Every task that the source gave and the trainer has not learned from: waiting, being played, ready or
taken.

A task is in one of these places only. All of them are in the checkpointed state, so no task is lost or
comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from whet.data.source import Source
from whet.rollout.order import Order, begun, ordered
from whet.rollout.play import Play
from whet.types import JSON, Group


class Spare(NamedTuple):
    """A group that a filter dropped, kept for a rollout that does not become full without it."""

    play: Play
    group: Group
    reason: str


@dataclass(slots=True)
class Buffer:
    """Groups between the source and the trainer.

    Args:
        num_samples: trajectories of each group.
        baseline: whether each task is played greedily, too.
    """

    num_samples: int
    baseline: bool
    waiting: list[Play] = field(default_factory=list[Play])
    """Groups to begin before any new task, in order."""
    playing: list[Play] = field(default_factory=list[Play])
    ready: list[Play] = field(default_factory=list[Play])
    taken: list[Play] = field(default_factory=list[Play])
    spare: list[Spare] = field(default_factory=list[Spare])
    """Without refills: groups of the current rollout that filters dropped."""
    num_begun: int = 0

    def next(self, source: Source) -> Play:
        """The group to begin now.

        Raises:
            ValueError: if the source gives a task that is in the buffer already.
        """
        if self.waiting:
            return self.waiting.pop(0)
        (task,) = source.next(1)
        if task.id in (play.task.id for plays in (self.playing, self.ready, self.taken) for play in plays):
            raise ValueError(f"the source gave the task {task.id!r} while it is being played; no two tasks of a run may have one id")
        self.num_begun += 1
        return Play(task, self.num_begun - 1, self.num_samples, self.baseline)

    def wait(self, play: Play) -> None:
        self.waiting = sorted([*self.waiting, play], key=begun)

    def choose(self, num: int, order: Order | None) -> None:
        """Take the first `num` ready groups, by the start of their play or by `order`."""
        ready = sorted(self.ready, key=begun)
        if order is not None:
            ready = ordered(ready, order)
        self.taken, self.ready = ready[:num], ready[num:]

    def put_back(self) -> None:
        """Return the taken groups to the ready ones."""
        self.ready = sorted([*self.taken, *self.ready], key=begun)
        self.taken = []

    def forget_spare(self) -> None:
        """Discard the groups that filters dropped; their tasks wait to be played again."""
        for play, _, _ in self.spare:
            self.wait(play)
        self.spare.clear()

    def call_in(self, num: int) -> list[Spare]:
        """Remove and return the first `num` groups that filters dropped, by the start of their play."""
        self.spare.sort(key=lambda spare: spare.play.index)
        called, self.spare = self.spare[:num], self.spare[num:]
        return called

    def older_than(self, version: int) -> list[Play]:
        """Remove and return the ready groups whose newest token is older than `version`."""
        old = [play for play in self.ready if play.newest is not None and play.newest < version]
        self.ready = [play for play in self.ready if play not in old]
        return old

    def state(self, *, resumable: bool) -> JSON:
        """State of every task in the buffer, each as `Play.state`."""
        spare = [spare.play for spare in self.spare]
        plays = sorted([*self.waiting, *self.playing, *self.ready, *self.taken, *spare], key=begun)
        return {"num_begun": self.num_begun, "plays": [play.state(resumable) for play in plays]}

    def restore(self, state: JSON, source: Source) -> None:
        """Raises ValueError if the source has no such task."""
        plays = [Play.restored(each, source.find, self.num_samples, self.baseline) for each in state["plays"]]
        self.num_begun = state["num_begun"]
        self.ready = [play for play in plays if play.judged]
        self.waiting = [play for play in plays if not play.judged]

    def begin_anew(self) -> None:
        """Discard everything that was played: all tasks of the buffer wait."""
        assert not self.playing and not self.taken and not self.spare, "something is under way"
        self.waiting, self.ready = sorted([*self.waiting, *self.ready], key=begun), []
        for play in self.waiting:
            play.forget()
