"""The rollout under way: what of it has ended, so that a run that is stopped in the middle does not play it again."""

from __future__ import annotations

import json

from whet.reward.wire import trajectory_from_json, trajectory_to_json
from whet.types import JSON, Trajectory


class Underway:
    """The trajectories of the present rollout that have ended; its tasks are the next of the data cursor.

    Args:
        kept: whether a checkpoint keeps them. Not in deterministic mode: which trajectories share the engine's steps would change.
    """

    def __init__(self, *, kept: bool) -> None:
        self.ended: dict[str, Trajectory] = {}
        self._kept = kept

    def clear(self) -> None:
        """The rollout is whole, or is to be played anew."""
        self.ended.clear()

    def state(self) -> JSON:
        """The valid ones that JSON can hold: what failed, or has other metadata, is played again."""
        states = [trajectory_to_json(t) for t in self.ended.values() if t.outcome.valid] if self._kept else []
        return [state for state in states if _is_json(state)]

    def restore(self, state: JSON) -> None:
        self.ended = {t.id: t for t in map(trajectory_from_json, state)}


def _is_json(state: JSON) -> bool:
    try:
        json.dumps(state)
    except (TypeError, ValueError):
        return False
    return True
