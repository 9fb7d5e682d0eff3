"""A guard against rewards that do not vary: there is nothing to learn from them, and most often they are a mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence

from whet.rollout.samples import score_of
from whet.types import JSON, Group, Outcome, RunFailed

WARN_AFTER = 3
"""Rollouts with one and the same reward before the guard says so."""


MOSTLY = 0.5
"""Share of truncated trajectories from which a message about a constant reward also names the limits."""


class ConstantReward(RunFailed):
    """Every reward of the run so far was the same number."""


class RewardGuard:
    """Watches whether the reward has ever varied. Once it has, the guard stops nothing, for a task may be learned to the end; it says so
    if replies to one prompt are always scored alike, and if all rewards fall to one lower number.

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
        self._cut = 0.0  # share of the last rollout's trajectories
        self._num_flat = 0  # rollouts whose rewards differed between prompts alone
        self._best = -math.inf  # mean reward of a rollout since this start
        self._num_lost = 0  # rollouts in a row with one and the same reward, below that
        self._compares = True  # until siblings' rewards differed, or a notice said that they do not

    def see(self, groups: Sequence[Group]) -> str | None:
        """Take note of a rollout.

        Returns:
            What the person should know, when it has just come to be so.
        """
        by_group = [[score for trajectory in group.played if (score := score_of(trajectory)) is not None] for group in groups]
        scores = [score for group in by_group for score in group]
        self._varied = self._varied or len({*scores, self._value} - {None}) > 1
        if not scores or not self._rewards_teach:
            return None
        lost = self._lost(scores)
        if self._varied:
            return lost or self._flat([group for group in by_group if len(group) > 1])
        self._value = scores[0]
        ends = [trajectory.outcome for group in groups for trajectory in group.played if trajectory.outcome.valid]
        self._cut = ends.count(Outcome.TRUNCATED) / len(ends)
        self._num_constant += 1
        limits = ", or are the limits too low" if self._mostly_cut else ""
        return f"{self._finding}: is the reward a constant{limits}?" if self._num_constant == WARN_AFTER else None

    def _lost(self, scores: Sequence[float]) -> str | None:
        """Message about rewards that fell to one constant number, which teaches nothing; None: they did
        not."""
        alike = len(set(scores)) == 1
        mean = scores[0] if alike else math.fsum(scores) / len(scores)
        self._num_lost = self._num_lost + 1 if alike and mean < self._best else 0
        self._best = max(self._best, mean)
        if self._num_lost != WARN_AFTER:
            return None
        return (
            f"every valid trajectory of the last {WARN_AFTER} rollouts was given the reward {mean:g}, where the mean has been "
            f"{self._best:g}: the policy may have collapsed, and rewards that are all alike teach nothing that leads out of it; begin "
            "again from an earlier checkpoint (checkpoint.restore), with a lower train.optim.lr"
        )

    def _flat(self, groups: Sequence[Sequence[float]]) -> str | None:
        """Message about rewards that differ between prompts and never between replies to the same
        prompt; None: they do not."""
        if not self._compares or not groups:
            return None
        differ = any(len(set(scores)) > 1 for scores in groups)
        self._num_flat += len({scores[0] for scores in groups}) > 1
        self._compares = not differ and self._num_flat < WARN_AFTER
        if differ or self._compares:
            return None
        return (
            f"in {self._num_flat} rollouts the rewards differed from prompt to prompt, and never between replies to one prompt: "
            "does the reward read the reply? Rewards that are all alike teach nothing"
        )

    def check(self) -> None:
        """Stop the run if the reward has been constant for too long.

        Raises:
            ConstantReward: if the limit is reached.
        """
        if not self._varied and self._limit is not None and self._num_constant >= self._limit:
            raise ConstantReward(
                f"{self._finding}: there is nothing to learn from that. See what the reward gives for a good and a bad reply (whet check "
                "does), whether the model can solve any of the tasks, or raise stop_after_constant_rewards (none: never stop)"
            )

    def state(self) -> JSON:
        return {"value": self._value, "num_constant": self._num_constant, "varied": self._varied}

    def restore(self, state: JSON) -> None:
        """Restore the counts. After a stop for constant rewards they restart at 0, for the reward may
        have been corrected since."""
        if not state["varied"] and self._limit is not None and state["num_constant"] >= self._limit:
            return
        self._value, self._num_constant, self._varied = state["value"], state["num_constant"], state["varied"]
        self._compares = not self._varied

    @property
    def _finding(self) -> str:
        text = f"every valid trajectory of all {self._num_constant} rollouts so far was given the reward {self._value:g}"
        if not self._mostly_cut:
            return text
        limits = "rollout.max_turn_tokens, rollout.max_tokens, rollout.max_turns"
        return f"{text}, and of the last one {self._cut:.0%} were cut off by the limits ({limits})"

    @property
    def _mostly_cut(self) -> bool:
        return self._cut >= MOSTLY
