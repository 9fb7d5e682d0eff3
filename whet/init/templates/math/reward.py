"""The reward: 1 for the right number, 0.1 for a reply that has a number at all."""

import re

from whet.types import Trajectory


def score(trajectory: Trajectory) -> dict[str, float]:
    """Score a reply by its last number."""
    found = re.findall(r"-?\d+", trajectory.response)
    return {"right": float(bool(found) and found[-1] == trajectory.task.label), "number": 0.1 * bool(found)}
