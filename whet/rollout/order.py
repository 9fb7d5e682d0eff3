"""Which groups come first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whet.rollout.play import Play
from whet.types import Group

Order = Callable[[list[Group]], Sequence[Group]]
"""Sorts finished groups: those that are trained on first come first."""


def begun(play: Play) -> int:
    """Number of groups that were begun before this one: groups wait in this order, and by default are
    trained on in it."""
    return play.index


def ordered(plays: list[Play], order: Order) -> list[Play]:
    """As a user's function sorts their groups.

    Raises:
        ValueError: if it gives others back than it was given.
    """
    groups = [play.group() for play in plays]
    by_task = {group.task.id: play for group, play in zip(groups, plays, strict=True)}
    given = order(groups)
    if not isinstance(given, Sequence) or not all(isinstance(group, Group) for group in given):
        raise ValueError(f"control.order returned {type(given).__name__}; return a list of the groups that it was given, sorted")
    found = [group.task.id for group in given]
    if sorted(found) != sorted(by_task):
        raise ValueError(f"control.order was given {len(by_task)} groups and returned {len(found)}; it must return the same ones, sorted")
    return [by_task[id] for id in found]
