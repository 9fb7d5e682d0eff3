"""The reward of the example: the customer has what they came for."""

from __future__ import annotations

from whet.types import Outcome, Trajectory

FRUITS = ("apple", "banana", "cherry", "fig", "grape", "lemon", "mango", "pear")


def served(trajectory: Trajectory) -> dict[str, float]:
    """1 if the last reply names the fruit that the customer wants and no other one, less a tenth for each further reply that it took. A
    reply that a limit cut is no answer."""
    named = [fruit for fruit in FRUITS if fruit in trajectory.response]
    right = float(named == [trajectory.task.label] and trajectory.outcome is Outcome.COMPLETED)
    return {"right": right, "patience": -0.1 * (len(trajectory.turns) - 1)}
