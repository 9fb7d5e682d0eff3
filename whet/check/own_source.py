"""A source of the user's own, tried out: the first tasks are taken, found again, and given again after a restore."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from whet.check.boundary import run_user_code
from whet.check.context import TRAINING, Scene
from whet.check.findings import Note, fail, ok
from whet.data.own import own_source
from whet.plan.text import several
from whet.types import Task

LOOKED_AT = 64
"""Tasks that are taken from it, at most."""
DEADLINE_S = 120.0
"""For it to be made and to give them."""


def own_tasks(scene: Scene) -> Sequence[Task]:
    """The first tasks of `data.source`, which is made where it was not yet.

    Raises:
        ValueError: it cannot be made, raises, or breaks its protocol.
    """
    if scene.source is None:
        run_user_code(f"data.source {scene.rl.data.source!r}", lambda: _look(scene), DEADLINE_S)
    return scene.rows[TRAINING]


def _look(scene: Scene) -> None:
    data = scene.rl.data
    assert data.source is not None
    source = own_source(data.source, data.source_options, scene.rl.seed, min(data.source_timeout_s, DEADLINE_S))
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
    scene.source, scene.rows[TRAINING] = source, tasks


def check_source(scene: Scene) -> Iterator[Note]:
    """Whether it keeps to its protocol."""
    try:
        tasks = own_tasks(scene)
    except ValueError as error:
        yield fail(str(error))
        return
    assert scene.source is not None
    looked = several(len(tasks), "task")
    yield ok(f"data.source {scene.rl.data.source} has {len(scene.source)} tasks an epoch; {looked} taken, found again and given again")
