"""The reward of the example, from what the program printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from whet.types import Outcome, Trajectory


def answered(trajectory: Trajectory) -> float:
    """1 if what the program printed has the label in it, and no other value that could have been the answer.

    A program that failed printed nothing, and one that a limit cut has no answer.
    """
    if trajectory.outcome is not Outcome.COMPLETED:
        return 0.0
    printed, others = str(trajectory.turns[-1].notes[-1].attachments["stdout"]), trajectory.task.metadata["others"]
    assert isinstance(others, Sequence)
    return float(_names(printed, trajectory.task.label) and not any(_names(printed, other) for other in others))


def _names(text: str, value: object) -> bool:
    return re.search(rf"\b{re.escape(str(value))}\b", text, re.IGNORECASE) is not None
