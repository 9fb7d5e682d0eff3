"""Check of the user's own source: its first tasks are taken, found by their ids, and taken again after a
restore.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from whet.check.boundary import run_user_code
from whet.check.context import TRAINING, CheckContext
from whet.check.findings import Note, fail, ok
from whet.data.own import own_source
from whet.plan.text import several
from whet.types import Task

LOOKED_AT = 64
"""Maximum number of tasks that are taken."""
DEADLINE_S = 120.0
"""Deadline for making the source and taking its tasks."""


def own_tasks(context: CheckContext) -> Sequence[Task]:
    """First tasks of `data.source`, which is made if it was not yet.

    Raises:
        ValueError: it cannot be made, raises, or breaks its protocol.
    """
    if context.source is None:
        run_user_code(f"data.source {context.rl.data.source!r}", lambda: _look(context), DEADLINE_S)
    return context.rows[TRAINING]


def _look(context: CheckContext) -> None:
    data = context.rl.data
    assert data.source is not None
    source = own_source(data.source, data.source_options, context.rl.seed, min(data.source_timeout_s, DEADLINE_S))
    start = json.dumps(source.state())
    tasks = source.next(min(len(source), LOOKED_AT))
    if len({task.id for task in tasks}) < len(tasks):
        raise ValueError(f"data.source = {data.source!r} gave two tasks with one id; no two tasks of a run may have one")
    if source.find(tasks[0].id) != tasks[0]:
        raise ValueError(f"data.source = {data.source!r}: find({tasks[0].id!r}) gives another task than next() gave under this id")
    source.restore(json.loads(start))
    again = source.next(1)[0]
    if again != tasks[0]:
        raise ValueError(f"data.source = {data.source!r} gives {again.id!r} after a restore where it gave {tasks[0].id!r} before")
    source.restore(json.loads(start))
    context.source, context.rows[TRAINING] = source, tasks


def check_source(context: CheckContext) -> Iterator[Note]:
    """Check that the source keeps to its protocol."""
    try:
        tasks = own_tasks(context)
    except ValueError as error:
        yield fail(str(error))
        return
    assert context.source is not None
    looked = several(len(tasks), "task")
    yield ok(f"data.source {context.rl.data.source} has {len(context.source)} tasks an epoch; {looked} taken, found again and given again")
