"""The reward: 1 for the right answer, 0.1 for having searched."""

from whet.types import Trajectory


def score(trajectory: Trajectory) -> dict[str, float]:
    """Score the last reply, and a search before it."""
    searched = any(turn.message.tool_calls for turn in trajectory.turns)
    return {"right": float(str(trajectory.task.label).lower() in trajectory.response.lower()), "searched": 0.1 * searched}
