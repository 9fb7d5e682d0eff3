"""Sources of tasks that no file holds: numbered ones for games that draw themselves from a seed, and those of generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from whet.data.cursor import Cursor, EpochSource
from whet.data.source import task_digest
from whet.types import Message, Task

EPOCH = "#"


class TaskList(EpochSource):
    """The tasks of a list, epoch after epoch, in a seeded order.

    Args:
        name: name of the source, for errors and as the beginning of the tasks' origins.
        tasks: at least one; their ids have no `#`.
        seed: seed of the orders.
        shuffle: give every epoch its own order.
    """

    def __init__(self, name: str, tasks: Sequence[Task], seed: int, *, shuffle: bool = True) -> None:
        if not tasks:
            raise ValueError(f"the source {name!r} has no tasks")
        self._name, self._tasks = name, {task.id: task for task in tasks}
        self._ids = list(self._tasks)
        items = [task_digest(task, whole=False) for task in tasks]
        self._cursor = Cursor(name, items, shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        return len(self._ids)

    def next(self, n: int) -> list[Task]:
        return [self.find(f"{self._ids[index]}{EPOCH}{epoch}") for index, epoch in self._cursor.take(n)]

    def find(self, task_id: str) -> Task:
        name, mark, _ = task_id.rpartition(EPOCH)
        if not mark or name not in self._tasks:
            raise ValueError(f"the source {self._name!r} has no task {task_id!r}: its options changed; go on with those of that run")
        return replace(self._tasks[name], id=task_id)


def numbered(seed: int, size: int = 1000, prompt: str = "", system: str = "", metadata: Mapping[str, Any] | None = None) -> TaskList:
    """Tasks with one prompt and numbers from 0 on, for environments that say themselves what there is to do. In every epoch an environment
    that draws itself from the task's id draws another game.

    Args:
        seed: seed of the order.
        size: tasks of an epoch.
        prompt: message of the user, to which a game adds what it shows first.
        system: message of the system before it.
        metadata: metadata of every task.
    """
    first = (Message("system", system),) if system else ()
    messages = (*first, Message("user", prompt))
    return TaskList("numbered", [Task(f"numbered/{i}", messages, metadata=dict(metadata or {})) for i in range(size)], seed)


def reasoning_gym(
    seed: int, dataset: str | Sequence[str], size: int = 500, config: Mapping[str, Any] | None = None, system: str = ""
) -> TaskList:
    """Tasks of reasoning-gym's generators. `reward.name = "reasoning_gym"` scores them with the generator's own verifier.

    Args:
        seed: seed of the generators, and of the order.
        dataset: name of a generator, or several.
        size: tasks of each.
        config: the generator's settings, which must be single numbers, texts or truth values.
        system: message of the system before the question; the answer is expected in `<answer>...</answer>` if there is none.

    Raises:
        ValueError: the package is missing, or it has no such generator or setting.
    """
    if find_spec("reasoning_gym") is None:
        raise ValueError("data.source = 'reasoning_gym' needs the package reasoning-gym: pip install reasoning-gym")
    gym = import_module("reasoning_gym")

    settings, names = dict(config or {}), [dataset] if isinstance(dataset, str) else list(dataset)
    first = Message("system", system or "Give your final answer between <answer> and </answer>.")
    tasks: list[Task] = []
    for name in names:
        made: Any = gym.create_dataset(name, seed=seed, size=size, **settings)
        for i in range(size):
            entry = made[i]
            asked = {"dataset": name, "seed": seed, "size": size, "config": settings, "index": i}
            prompt = (first, Message("user", str(entry["question"])))
            label = None if entry["answer"] is None else str(entry["answer"])
            tasks.append(Task(f"{name}/{i}", prompt, label, {"reasoning_gym": asked}, origin=f"reasoning_gym:{name}:{i}"))
    return TaskList("reasoning_gym", tasks, seed)
