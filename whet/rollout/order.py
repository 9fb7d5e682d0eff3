"""Which groups come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whet.rollout.group_run import GroupRun
from whet.types import Group

Order = Callable[[list[Group]], Sequence[Group]]
"""Sorts finished groups: those that are trained on first come first."""


def start_order(group_run: GroupRun) -> int:
    """Number of groups that were started before this one: groups wait in this order, and by default are
    trained on in it."""
    return group_run.index


def ordered(group_runs: list[GroupRun], order: Order) -> list[GroupRun]:
    """As a user's function sorts their groups.

    Raises:
        ValueError: if it gives others back than it was given.
    """
    groups = [group_run.group() for group_run in group_runs]
    by_task = {group.task.id: group_run for group, group_run in zip(groups, group_runs, strict=True)}
    given = order(groups)
    if not isinstance(given, Sequence) or not all(isinstance(group, Group) for group in given):
        raise ValueError(f"control.order returned {type(given).__name__}; return a list of the groups that it was given, sorted")
    found = [group.task.id for group in given]
    if sorted(found) != sorted(by_task):
        raise ValueError(f"control.order was given {len(by_task)} groups and returned {len(found)}; it must return the same ones, sorted")
    return [by_task[id] for id in found]
