"""The reward of the example: the folder as it ended, and the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from whet.types import JSON, Outcome, Trajectory


def done(trajectory: Trajectory) -> float:
    """1 if the folder ended as the row wants it, no other file changed, and the last number of the answer is the label, where there is one.

    A trajectory that a limit cut has no answer.
    """
    wanted, label = trajectory.task.metadata["wanted"], trajectory.task.label
    answered = label is None or re.findall(r"\d+", trajectory.response)[-1:] == [label]
    return float(answered and trajectory.outcome is Outcome.COMPLETED and last_files(trajectory) == wanted)


def last_files(trajectory: Trajectory) -> Mapping[str, JSON]:
    """The folder's files after the last call, or as the folder began."""
    notes = [note for turn in trajectory.turns for note in turn.notes if "files" in note.attachments]
    found = notes[-1].attachments["files"] if notes else trajectory.task.metadata["files"]
    assert isinstance(found, Mapping)
    return found
