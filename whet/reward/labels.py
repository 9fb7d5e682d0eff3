"""Which rows a reward cannot score, by their labels and metadata alone: known before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.reward.base import LabelError, label_of
from whet.reward.build import RewardConfig, components_of, options_of
from whet.reward.dispatch import DispatchOptions, kind_of, row_reward
from whet.reward.math.math import read_label
from whet.reward.published.answers import score_f1, score_search
from whet.reward.published.dapo import slime_dapo, verl_math_dapo
from whet.reward.published.gpqa import score_gpqa
from whet.reward.published.ifeval import score_ifeval
from whet.reward.published.verified import check_label
from whet.reward.rubric import read_criteria
from whet.types import Rewards, Task

Reader = Callable[[Task], object]
"""Reads a row as a reward does. It raises LabelError for one that cannot be scored."""

SHOWN = 5


def _tried(rule: Callable[[Task, str, Any], Rewards]) -> Callable[[Any], Reader]:
    """Reads a row as a rule of the reply's text does, with an empty reply."""

    def reader(options: Any) -> Reader:
        def read(task: Task) -> None:
            rule(task, "", options)

        return read

    return reader


def _labelled(name: str) -> Callable[[Any], Reader]:
    """Reads a row for a reward that takes any label."""

    def read(task: Task) -> None:
        label_of(task, name)

    return lambda options: read


def _criteria(options: Any) -> Reader:
    def read(task: Task) -> None:
        read_criteria(task, options.criteria_key)

    return read


def _dispatched(options: DispatchOptions) -> Reader:
    choices = options.choices()
    readers = {kind: reader_of(choice.name, choice.options) for kind, choice in choices.items()}

    def read(task: Task) -> None:
        chosen = readers[row_reward(task, kind_of(task, options), readers, options.key)]
        if chosen is not None:
            chosen(task)

    return read


READERS: dict[str, Callable[[Any], Reader]] = {
    "math": lambda options: read_label,
    "math_verify": lambda options: check_label,
    "f1": _tried(score_f1),
    "search_em": _tried(score_search),
    "gpqa": _tried(score_gpqa),
    "ifeval": _tried(score_ifeval),
    "slime_dapo": _tried(slime_dapo),
    "verl_math_dapo": _tried(verl_math_dapo),
    "rubric": _criteria,
    "dispatch": _dispatched,
    **{name: _labelled(name) for name in ("exact", "verl_gsm8k", "hendrycks_math", "slime_math", "deepscaler", "geo3k", "prime_math")},
}
"""Given the options, of the built-in rewards that want something of a row; any row will do for the others."""


def reader_of(name: str, options: Mapping[str, Any]) -> Reader | None:
    """Reader of a reward's rows; None: the reward has none, and any row may do."""
    return READERS[name](options_of(name, options)) if name in READERS else None


def readers_of(config: RewardConfig) -> list[Reader]:
    """Readers of the rows of a reward's parts."""
    parts = components_of(config).values() if config.scores_each else ()
    return [reader for part in parts if (reader := reader_of(part.name, part.options)) is not None]


async def unusable_rows(config: RewardConfig, tasks: Sequence[Task]) -> list[str]:
    """Faults of the rows that a reward cannot score, a line each.

    Rewards that come with whet read their rows here as they do in the run. A user's functions, models
    and servers are not called.
    """
    readers = readers_of(config)
    faults: list[str] = []
    for task in tasks:
        try:
            for reader in readers:
                reader(task)
        except LabelError as fault:
            faults.append(str(fault))
    return faults


def text_of_faults(what: str, faults: Sequence[str], total: int) -> str:
    """The faults of a data set's rows in words, the first few of them quoted."""
    if len(faults) == 1:
        return faults[0]
    more = f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return f"{len(faults)} of the {total} rows {what} cannot be scored:\n" + "\n".join(f"  {fault}" for fault in faults[:SHOWN]) + more
