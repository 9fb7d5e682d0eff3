"""The reward of siblings together: once all trajectories of a task have ended, before any filter sees the group."""

from __future__ import annotations

import time
from dataclasses import replace

from whet.env.failure import failure_of
from whet.reward.base import GroupReward, LabelError, RewardTimeout, place_token_rewards
from whet.types import Group, Outcome, Trajectory

PLACE = "reward.group"
"""Place of a group reward's failures."""


async def judge_siblings(group: Group, reward: GroupReward) -> Group:
    """A group with the rewards of its siblings together, in place of those that each had. Those that failed are left out of it.

    A reward that fails is an outcome of all siblings that it was asked about, never a 0.

    Raises:
        LabelError: the reward cannot use the task's label.
    """
    valid = [t for t in group.trajectories if t.outcome.valid]
    if not valid:
        return group
    began = time.monotonic()
    try:
        scores = await reward(valid)
        placed = [place_token_rewards(t, rewards) for t, rewards in zip(valid, scores, strict=True)]
        judged = [replace(t, rewards=rewards) for t, rewards in placed]
    except LabelError:
        raise
    except (RewardTimeout, TimeoutError) as late:
        judged = [_failed(t, Outcome.TIMEOUT, late) for t in valid]
    except Exception as fault:  # the rollout boundary
        judged = [_failed(t, Outcome.REWARD_ERROR, fault) for t in valid]
    seconds = time.monotonic() - began
    found = {t.id: replace(t, timings={**t.timings, "reward": t.timings.get("reward", 0.0) + seconds}) for t in judged}
    return replace(group, trajectories=tuple(found.get(t.id, t) for t in group.trajectories))


def _failed(trajectory: Trajectory, outcome: Outcome, error: Exception) -> Trajectory:
    return replace(trajectory, outcome=outcome, rewards=None, error=failure_of(error, PLACE))
