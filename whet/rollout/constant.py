"""A guard against rewards that never vary: there is nothing to learn from them, and most often they are a mistake."""

from __future__ import annotations

from collections.abc import Sequence

from whet.rollout.samples import score_of
from whet.types import JSON, Group

WARN_AFTER = 3
"""Rollouts with one and the same reward before the guard says so."""


class ConstantReward(RuntimeError):
    """Every reward of the run so far was the same number."""


class RewardGuard:
    """Watches whether the reward has ever varied. Once it has, the guard is content: a task may be learned to the end.

    Args:
        limit: rollouts with one and the same reward, from the run's start, before it stops; None: any number.
        rewards_teach: False where something else does, such as a teacher: then nothing is said of them, and they never stop a run.
    """

    def __init__(self, limit: int | None, *, rewards_teach: bool = True) -> None:
        self._limit = limit
        self._rewards_teach = rewards_teach
        self._value: float | None = None
        self._num_constant = 0
        self._varied = False

    def see(self, groups: Sequence[Group]) -> str | None:
        """Take note of a rollout.

        Returns:
            What the person should know, the first time that there is something.
        """
        scores = (score_of(trajectory) for group in groups for trajectory in group.played)
        rewards = {score for score in scores if score is not None}
        self._varied = self._varied or len(rewards | {self._value} - {None}) > 1
        if self._varied or not rewards or not self._rewards_teach:
            return None
        self._value = rewards.pop()
        self._num_constant += 1
        return f"{self._told}: is the reward a constant?" if self._num_constant == WARN_AFTER else None

    def check(self) -> None:
        """Raises:
        ConstantReward: if the limit is reached.
        """
        if not self._varied and self._limit is not None and self._num_constant >= self._limit:
            raise ConstantReward(
                f"{self._told}: there is nothing to learn from that. See what the reward gives for a good and a bad reply (whet check "
                "does), whether the model can solve any of the tasks, or raise stop_after_constant_rewards (none: never stop)"
            )

    def state(self) -> JSON:
        return {"value": self._value, "num_constant": self._num_constant, "varied": self._varied}

    def restore(self, state: JSON) -> None:
        """Go on counting; after a stop for constant rewards anew, for the reward may have been mended since."""
        if not state["varied"] and self._limit is not None and state["num_constant"] >= self._limit:
            return
        self._value, self._num_constant, self._varied = state["value"], state["num_constant"], state["varied"]

    @property
    def _told(self) -> str:
        return f"every valid trajectory of all {self._num_constant} rollouts so far was given the reward {self._value:g}"
