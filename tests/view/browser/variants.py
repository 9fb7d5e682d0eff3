"""Settings of runs of every built-in algorithm and loss besides PPO's, GRPO's, GSPO's and CISPO's usual ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.test_records_recomputed import PPO

HERE = Path(__file__).parent


def ppo(**changes: Any) -> dict[str, Any]:
    """PPO's settings with changes of its algorithm's."""
    return {**PPO, "algo": PPO["algo"] | changes}


VARIANTS: dict[str, dict[str, Any]] = {
    "dapo": {"algo": {"name": "grpo", "clip_high": 0.28, "reducer": "token_mean", "normalize_std": True}},
    "dr_grpo": {"algo": {"name": "dr_grpo"}},
    "sapo": {"algo": {"name": "sapo"}},
    "gmpo": {"algo": {"name": "gmpo", "clip_low": 0.05, "clip_high": 0.05}},
    "grpo_passk": {"algo": {"name": "grpo_passk", "reducer": "group_mean"}},
    "rloo": {"algo": {"name": "rloo", "kl_reward": {"coef": 0.1, "estimator": "k3"}}},
    "opo": {"algo": {"name": "opo", "reducer": "token_sum_mean"}},
    "gpg": {"algo": {"name": "gpg"}},
    "maxrl": {"algo": {"name": "maxrl", "reducer": "sequence_mean"}},
    "remax": {"algo": {"name": "remax", "reducer": "constant", "reducer_scale": 50.0}},
    "reinforce_plus_plus": {"algo": {"name": "reinforce_plus_plus", "gamma": 0.9, "kl_reward": {"coef": 0.1}}},
    "reinforce_plus_plus_turns": {"algo": {"name": "reinforce_plus_plus", "gamma": 0.9, "credit_over": "turns"}},
    "reinforce_plus_plus_all": {"algo": {"name": "reinforce_plus_plus", "gamma": 0.9, "credit_over": "all"}},
    "reinforce_plus_plus_baseline": {"algo": {"name": "reinforce_plus_plus_baseline", "reducer": "sequence_sum"}},
    "whitened": {"algo": {"name": "grpo", "whiten": True}},
    "ppo_all": ppo(credit_over="all", reward_at="last_token", whiten=False),
    "ppo_adaptive": ppo(kl_reward={"coef": 0.1, "target": 0.01, "horizon": 10}),
    "clip_cov": {"algo": {"name": "grpo", "loss": {"name": "clip_cov", "covariance_share": 0.2, "covariance_bounds": [0.0001, 5.0]}}},
    "kl_cov": {"algo": {"name": "grpo", "loss": {"name": "kl_cov", "covariance_share": 0.2}}},
    "sequence_mask": {"algo": {"name": "grpo", "mask_delta": 0.001}},
    "corrected": {"algo": {"name": "grpo", "correction": {"preset": "decoupled_token_is"}, "kl_coef": 0.1, "kl_unbiased": True}},
    "corrected_gmpo": {"algo": {"name": "gmpo", "correction": {"preset": "decoupled_token_is"}}},
    "two_steps": {"algo": {"name": "grpo"}, "batch": {"steps_per_rollout": 2}},
    "otb": {"algo": {"name": "otb"}},
    "own_loss": {"algo": {"name": "grpo", "loss": {"name": f"{HERE / 'own_algorithm.py'}:squares"}}},
    "own": {"algo": {"name": f"{HERE / 'own_algorithm.py'}:halves"}},
}
UNKNOWN: dict[str, dict[str, str]] = {
    "ppo_adaptive": {"kl_reward": "follows a target"},
    "two_steps": {"weight": "share its samples"},
    "otb": {"advantage": "squared probabilities"},
    "own_loss": {"ratio": "your own", "clip": "your own", "loss": "your own", "weight": "your own"},
    "own": {"advantage": "is not computed again", "ratio": "your own", "clip": "your own", "loss": "your own", "weight": "your own"},
}
"""Quantities that the page cannot compute, and what it says instead."""
