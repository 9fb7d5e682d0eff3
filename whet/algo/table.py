"""Algorithms by name, one file each, and how the configured one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whet.algo.base import Algorithm, StepPlan
from whet.algo.config import AlgorithmConfig, CustomAlgorithmConfig
from whet.algo.gpg import gpg
from whet.algo.grpo import grpo
from whet.algo.grpo_passk import grpo_passk
from whet.algo.maxrl import maxrl
from whet.algo.opo import opo
from whet.algo.otb import otb
from whet.algo.ppo import ppo
from whet.algo.reinforce_plus_plus import reinforce_plus_plus
from whet.algo.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from whet.algo.remax import remax
from whet.algo.rloo import rloo
from whet.config import call_factory, resolve_callable

ALGORITHMS: dict[str, Callable[[Any, StepPlan], Algorithm]] = {
    "grpo": grpo,
    "dr_grpo": grpo,
    "gspo": grpo,
    "cispo": grpo,
    "sapo": grpo,
    "gmpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "otb": otb,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "ppo": ppo,
}
"""Each takes the settings of its name, and what is known of a rollout's optimizer steps."""

MEMBERS = ("needs", "entropy_grad", "reducer", "prepare", "assign_credit", "loss")
"""Members of `Algorithm`."""


def build_algorithm(config: AlgorithmConfig, plan: StepPlan) -> Algorithm:
    """The configured algorithm.

    Raises:
        ValueError: if what a user's reference names makes no algorithm, or the settings do not go with the plan.
    """
    if not isinstance(config, CustomAlgorithmConfig):
        return ALGORITHMS[config.name](config, plan)
    factory = resolve_callable(config.name, kind="algorithm", given=["options", "plan"])
    algorithm = call_factory(factory, config.name, dict(config.options), plan, kind="algorithm")
    if not isinstance(algorithm, Algorithm):
        missing = [name for name in MEMBERS if not hasattr(algorithm, name)]
        raise ValueError(f"algorithm {config.name!r} made a {type(algorithm).__name__}, which has no {', '.join(missing)}")
    return algorithm
