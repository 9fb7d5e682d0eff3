"""A source of tasks that the user wrote: what it answers is looked at, and what goes wrong in it is told by the key that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from whet.config import Hook, call_factory, resolve_callable
from whet.data.source import Source
from whet.types import JSON, Task

KEY = "data.source"
MEMBERS = ("epoch", "__len__", "next", "find", "state", "restore")
"""Of `Source`."""


def own_source(reference: str, options: Mapping[str, Any], seed: int) -> OwnSource:
    """What `data.source` makes.

    Args:
        reference: names a function or class `(seed, **options) -> Source`.
        options: its keyword arguments.
        seed: of the run.

    Raises:
        ValueError: there is no such function, it raises, or what it makes is no source.
    """
    factory = resolve_callable(reference, kind=KEY, given=["seed"], options=options)
    made = call_factory(factory, reference, seed, kind=KEY, **options)
    missing = [name for name in MEMBERS if name not in dir(made)]
    if missing:
        raise ValueError(f"{KEY} = {reference!r} made a {type(made).__name__}, which has no {', '.join(missing)}")
    return OwnSource(reference, made)


class OwnSource:
    """A `Source` of the user's.

    Raises:
        HookFailed: wherever it raises, or answers something else than the protocol says.
    """

    def __init__(self, reference: str, made: Source) -> None:
        self._made = made
        self._hook = Hook(KEY, reference, lambda: None)
        if len(self) < 1:
            raise self._hook.refused("has no tasks: its len() is 0")

    @property
    def epoch(self) -> int:
        return int(self._hook.at(lambda: self._made.epoch)())

    def __len__(self) -> int:
        return int(self._hook.at(lambda: len(self._made))())

    def next(self, n: int) -> list[Task]:
        tasks = self._hook.at(self._made.next)(n)
        if not isinstance(tasks, list) or not all(isinstance(task, Task) for task in tasks):
            raise self._hook.refused(f"next({n}) returned {type(tasks).__name__}; return a list of whet.types.Task")
        if len(tasks) != n:
            raise self._hook.refused(f"next({n}) returned {len(tasks)} tasks; a source does not end, it begins its next epoch")
        return list(tasks)

    def find(self, task_id: str) -> Task:
        task = self._hook.at(self._made.find)(task_id)
        if not isinstance(task, Task) or task.id != task_id:
            raise self._hook.refused(f"find({task_id!r}) returned {task!r}; return the task that next() gave under this id")
        return task

    def state(self) -> dict[str, JSON]:
        state = self._hook.at(self._made.state)()
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise self._hook.refused(f"has a state that is not JSON: {error}") from error
        return state

    def restore(self, state: Mapping[str, JSON]) -> None:
        self._hook.at(self._made.restore)(state)
