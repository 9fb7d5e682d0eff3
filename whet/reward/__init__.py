"""Rewards: what a trajectory is worth. Failures are typed errors, never a silent 0."""

from whet.reward.base import GroupReward, LabelError, Reward, RewardError, RewardTimeout
from whet.reward.build import ComponentConfig, RewardChoice, RewardConfig, build_group_reward, build_reward

__all__ = [
    "ComponentConfig",
    "GroupReward",
    "LabelError",
    "Reward",
    "RewardChoice",
    "RewardConfig",
    "RewardError",
    "RewardTimeout",
    "build_group_reward",
    "build_reward",
]
