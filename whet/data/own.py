"""A source of tasks that the user wrote. Its answers are checked, and its errors name the key that it
is set by."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, TypeAdapter

from whet.background import Background
from whet.config import Hook, HookFailed, Reference, call_factory, place_in, resolve_callable
from whet.data.source import Source
from whet.types import JSON, Task

T = TypeVar("T")

KEY = "data.source"
MEMBERS = ("epoch", "__len__", "next", "find", "state", "restore")
"""Members of `Source`."""
SOURCES: Mapping[str, str] = {
    "numbered": "whet.data.generated:numbered",
    "reasoning_gym": "whet.data.generated:reasoning_gym",
    "verifiers": "whet.env.adapters.verifiers:verifiers_source",
}
"""Built-in sources, by reference: each is made as one of the user's own would be."""


def _check_source(name: str) -> str:
    if name not in SOURCES and ":" not in name:
        raise ValueError(f'there is no source {name!r}; choose {", ".join(map(repr, SOURCES))} or an import reference "module:name"')
    return name if name in SOURCES else TypeAdapter(Reference).validate_python(name)


SourceName = Annotated[str, AfterValidator(_check_source)]
"""Name of a built-in source, or a reference; only its form is checked until it is made."""


def own_source(reference: str, options: Mapping[str, Any], seed: int, timeout_s: float) -> OwnSource:
    """The source that `data.source` names.

    Args:
        reference: names a function or class `(seed, **options) -> Source`.
        options: its keyword arguments.
        seed: seed of the run.
        timeout_s: seconds that each call of the source, and its construction, may take.

    Raises:
        ValueError: there is no such function, it raises or hangs, or it makes no source.
    """
    factory = resolve_callable(SOURCES.get(reference, reference), kind=KEY, given=["seed"], options=options)

    def make() -> Source:
        made = call_factory(factory, reference, seed, kind=KEY, **options)
        missing = [name for name in MEMBERS if name not in dir(made)]
        if missing:
            raise ValueError(f"{KEY} = {reference!r} made a {type(made).__name__}, which has no {', '.join(missing)}")
        return made

    return OwnSource(reference, make, timeout_s)


class OwnSource:
    """A `Source` of the user's. It is made and called on one thread of its own.

    Args:
        reference: its name in the settings.
        make: makes it.
        timeout_s: seconds that each call may take.

    Raises:
        HookFailed: whenever the source raises, hangs, or breaks the protocol. A source that hung is not
            called again.
    """

    def __init__(self, reference: str, make: Callable[[], Source], timeout_s: float) -> None:
        self._hook = Hook(KEY, reference, lambda: None)
        self._timeout_s = timeout_s
        self._thread = Background(KEY)
        self._hung: HookFailed | None = None
        self._made = self._wait_for("the making", make)
        if len(self) < 1:
            raise self._hook.refused("has no tasks: its len() is 0")

    @property
    def epoch(self) -> int:
        return int(self._ask("epoch", lambda: self._made.epoch))

    def __len__(self) -> int:
        return int(self._ask("len()", lambda: len(self._made)))

    def next(self, n: int) -> list[Task]:
        tasks = self._ask(f"next({n})", lambda: self._made.next(n))
        if not isinstance(tasks, list) or not all(isinstance(task, Task) for task in tasks):
            raise self._hook.refused(f"next({n}) returned {type(tasks).__name__}; return a list of whet.types.Task")
        if len(tasks) != n:
            raise self._hook.refused(f"next({n}) returned {len(tasks)} tasks; a source does not end, it begins its next epoch")
        return list(tasks)

    def find(self, task_id: str) -> Task:
        task = self._ask(f"find({task_id!r})", lambda: self._made.find(task_id))
        if not isinstance(task, Task) or task.id != task_id:
            raise self._hook.refused(f"find({task_id!r}) returned {task!r}; return the task that next() gave under this id")
        return task

    def state(self) -> dict[str, JSON]:
        state = self._ask("state()", lambda: self._made.state())
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise self._hook.refused(f"has a state that is not JSON: {error}") from error
        return state

    def restore(self, state: Mapping[str, JSON]) -> None:
        self._ask("restore()", lambda: self._made.restore(state))

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        return self._wait_for(what, self._hook.at(call))

    def _wait_for(self, what: str, call: Callable[[], T]) -> T:
        if self._hung is not None:
            raise self._hung
        future = self._thread.do(call)
        if not wait([future], self._timeout_s).done:
            place = place_in(self._thread.stack())
            self._hung = self._hook.refused(
                f"hangs: {what} has not returned for {self._timeout_s:g} s{place}; have it wait no longer, or raise {KEY}_timeout_s"
            )
            raise self._hung
        return future.result()
