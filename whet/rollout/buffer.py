"""Where every task is that the source gave and the trainer has not learned from: waiting, being played, ready or taken, in one place only.

All of it is in the state that a checkpoint holds, so that no task is lost, and none comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from whet.data.source import Source
from whet.rollout.order import Order, begun, ordered
from whet.rollout.play import Play
from whet.types import JSON, Group


class Spare(NamedTuple):
    """What a filter dropped, kept for a rollout that does not become full without it."""

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
    """To be begun before any new task, in order."""
    playing: list[Play] = field(default_factory=list[Play])
    ready: list[Play] = field(default_factory=list[Play])
    taken: list[Play] = field(default_factory=list[Play])
    spare: list[Spare] = field(default_factory=list[Spare])
    """Without refills: what filters dropped of the rollout under way."""
    num_begun: int = 0

    def next(self, source: Source) -> Play:
        """What is to be begun now.

        Raises:
            ValueError: if the source gives a task that is on its way already.
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
        """Take so many of those that are ready: those begun first, or as the order has them."""
        ready = sorted(self.ready, key=begun)
        if order is not None:
            ready = ordered(ready, order)
        self.taken, self.ready = ready[:num], ready[num:]

    def put_back(self) -> None:
        """What was taken can be taken again."""
        self.ready = sorted([*self.taken, *self.ready], key=begun)
        self.taken = []

    def forget_spare(self) -> None:
        """Nothing that a filter dropped is kept any more: the tasks are played another time."""
        for play, _, _ in self.spare:
            self.wait(play)
        self.spare.clear()

    def call_in(self, num: int) -> list[Spare]:
        """So many of what filters dropped, those begun first, whatever ended when."""
        self.spare.sort(key=lambda spare: spare.play.index)
        called, self.spare = self.spare[:num], self.spare[num:]
        return called

    def older_than(self, version: int) -> list[Play]:
        """Of what is ready, that whose newest token is of an older version; it is no longer ready then."""
        old = [play for play in self.ready if play.newest is not None and play.newest < version]
        self.ready = [play for play in self.ready if play not in old]
        return old

    def state(self, *, resumable: bool) -> JSON:
        """Every task in it, as `Play.state` has them."""
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
        """Nothing that was played counts: all tasks that are in here wait."""
        assert not self.playing and not self.taken and not self.spare, "something is under way"
        self.waiting, self.ready = sorted([*self.waiting, *self.ready], key=begun), []
        for play in self.waiting:
            play.forget()
