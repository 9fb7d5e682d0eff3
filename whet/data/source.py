"""Tasks from data files in a seeded order, epoch after epoch, with a cursor that can be restored."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from pydantic import Field

from whet.data.cursor import Cursor, EpochSource
from whet.data.files import Row, paths_text
from whet.data.long_prompts import LongPrompts, cut_prompt
from whet.data.rows import RowConfig, read_all, renamed_columns, task_from
from whet.types import JSON, Task


class Source(Protocol):
    """An endless stream of tasks with a cursor."""

    @property
    def epoch(self) -> int:
        """The epoch that the next task belongs to, from 0 on."""
        ...

    def __len__(self) -> int:
        """Tasks in one epoch."""
        ...

    def next(self, n: int) -> list[Task]:
        """The next `n` tasks. Their ids are unique over all epochs."""
        ...

    def find(self, task_id: str) -> Task:
        """A task that `next` gave, in this process or in an earlier one.

        Raises:
            ValueError: there is none.
        """
        ...

    def state(self) -> dict[str, JSON]:
        """The cursor, as JSON."""
        ...

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continues where `state` was taken.

        Raises:
            ValueError: it was taken from another source.
        """
        ...


class SourceConfig(RowConfig):
    """Data files, which column means what, and the order."""

    path: str | list[str] = Field(min_length=1)
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the longest prompt that is played."""
    long_prompts: LongPrompts = "drop"
    """Treatment of longer prompts: dropped and counted, an error, or cut."""
    shuffle: bool = True
    """A new order in every epoch; false: the order of the files."""
    seed: int = 42
    """Seed of the shuffles."""


class TaskSource(EpochSource):
    """The tasks of data files, all in memory.

    A position in them holds while there are as many rows in the same order and the prompts (and tools) of those that were taken are the
    same: labels and metadata may be corrected, and so may rows that were not taken yet.

    Epoch e has the order `Random(seed + e).shuffle`, or the files' order; a batch that runs over an epoch's end
    continues in the next. A task's id is `name/row#epoch`; `row` counts the rows read, dropped ones included.
    """

    def __init__(
        self, config: SourceConfig, *, name: str = "train", length: Callable[[Task], int] | None = None
    ) -> None:
        """`length` counts a task's prompt tokens. It is needed where `max_prompt_tokens` is set; elsewhere it shows with the
        first prompt that prompts can be rendered at all.

        Raises:
            ValueError: the data cannot be read or rendered (`file:line`), are empty, or every prompt is too long.
        """
        self.name = name
        self._by_name: dict[str, Task] | None = None
        tasks = read_tasks(config, name)
        self._tasks = tasks
        if config.max_prompt_tokens is not None:
            if length is None:
                raise ValueError("max_prompt_tokens is set, but this source was given no way to count tokens (length)")
            self._tasks = _fitting(tasks, length, config, config.max_prompt_tokens)
        elif length is not None:
            _measure(tasks[0], length)
        self.num_dropped = len(tasks) - len(self._tasks)
        self.num_cut = 0 if self.num_dropped else sum(kept is not task for kept, task in zip(self._tasks, tasks, strict=True))
        items = [task_digest(task, whole=False) for task in self._tasks]
        self._cursor = Cursor(name, items, shuffle=config.shuffle, seed=config.seed)

    @property
    def tasks(self) -> Sequence[Task]:
        """One epoch in the order of the files; their ids end in `#0`."""
        return tuple(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def next(self, n: int) -> list[Task]:
        return [self._task(index, epoch) for index, epoch in self._cursor.take(n)]

    def find(self, task_id: str) -> Task:
        name, mark, _ = task_id.rpartition("#")
        if self._by_name is None:
            self._by_name = {task.id.rpartition("#")[0]: task for task in self._tasks}
        if not mark or name not in self._by_name:
            raise ValueError(f"source {self.name!r} has no task {task_id!r}: the data changed; go on with the data of that run")
        return replace(self._by_name[name], id=task_id)

    def _task(self, index: int, epoch: int) -> Task:
        task = self._tasks[index]
        return replace(task, id=f"{task.id.rpartition('#')[0]}#{epoch}")


def load_tasks(config: SourceConfig, *, name: str = "train", length: Callable[[Task], int] | None = None) -> list[Task]:
    """The tasks of data files in their order, without those over `max_prompt_tokens`. Arguments as for `TaskSource`."""
    return list(TaskSource(config, name=name, length=length).tasks)


def read_tasks(config: SourceConfig, name: str) -> list[Task]:
    """Every task of data files, in their order.

    Raises:
        ValueError: a file cannot be read, a column is missing or holds what it should not (`file:line`), or there are no rows.
    """
    numbers = itertools.count()
    has_label: dict[bool, str] = {}
    """First row with the label's column (True) and first row without it (False)."""

    def parse(row: Row) -> Task:
        has_label.setdefault(config.label_key is not None and row.has(config.label_key), row.origin)
        return task_from(row, config, f"{name}/{next(numbers)}#0")

    tasks = read_all(config.path, renamed_columns(config, "label_key", "metadata_key", "tools_key"), parse)
    if len(has_label) > 1:
        advice = "other rows have it; write null where there is no label"
        raise ValueError(f"{has_label[False]}: there is no column {config.label_key!r} (label_key), but {advice}")
    return tasks


def _fitting(tasks: list[Task], length: Callable[[Task], int], config: SourceConfig, limit: int) -> list[Task]:
    lengths = [_measure(task, length) for task in tasks]
    side = config.long_prompts
    long = [(task, tokens) for task, tokens in zip(tasks, lengths, strict=True) if tokens > limit]
    if side == "error" and long:
        task, tokens = long[0]
        raise ValueError(
            f"{task.origin}: the prompt has {tokens} tokens, more than max_prompt_tokens = {limit}, as {len(long)} of {len(tasks)} have: "
            "raise it, or choose long_prompts=drop, left, middle or right"
        )
    if side != "drop":
        return [task if tokens <= limit else cut_prompt(task, length, limit, side) for task, tokens in zip(tasks, lengths, strict=True)]
    fitting = [task for task, tokens in zip(tasks, lengths, strict=True) if tokens <= limit]
    if not fitting:
        spread = f"they have {min(lengths)} to {max(lengths)} tokens"
        raise ValueError(f"every prompt of {paths_text(config.path)} is longer than max_prompt_tokens = {limit}: {spread}; raise it")
    return fitting


def _measure(task: Task, length: Callable[[Task], int]) -> int:
    try:
        return length(task)
    except ValueError as error:
        raise ValueError(f"{task.origin}: {error}") from error


def task_digest(task: Task, *, whole: bool = True) -> bytes:
    """The sha256 of what a task says.

    `whole`: with its label and metadata. Without them it is that of the prompt, which must not change once it was played; the others may
    be corrected.
    """
    prompt = task.prompt if isinstance(task.prompt, str) else [message.to_dict(as_written=True) for message in task.prompt]
    content = [task.id, prompt, list(task.tools), *([task.label, dict(task.metadata)] if whole else [])]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).digest()
