"""Refusal of settings that nothing reads: a user who sets one expects an effect. A value equal to the
default counts as not set."""

from __future__ import annotations

from collections.abc import Iterable

from whet.config.base import Config
from whet.config.errors import show
from whet.config.schema import default_of


def refuse_unread(config: Config, names: Iterable[str], why: str, remedy: str) -> None:
    """Refuse those of a model's own settings that are not read, but were set.

    Args:
        config: the model.
        names: its settings that nothing reads as things stand.
        why: reason that nothing reads them: "with name=clip".
        remedy: a change after which they are read: "set name=sapo".

    Raises:
        ValueError: naming the first of them whose value is not its default.
    """
    for name in names:
        value = getattr(config, name)
        if value != default_of(type(config).model_fields[name]):
            raise ValueError(f"{name}={show(value)} has no effect {why}; {remedy}, or leave out {name}")
