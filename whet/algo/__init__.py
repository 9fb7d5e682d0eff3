"""Algorithms, one file each, in an explicit table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from whet.algo.base import Algorithm, LossFunction, LossTerms, Need, StepPlan
from whet.algo.grpo import GRPO, GRPOConfig
from whet.config import Config, call_factory, resolve_callable


class AlgorithmConfig(Config):
    """Which algorithm, and its settings."""

    name: str = "grpo"
    """A built-in algorithm, or an import reference `module:factory` called with (options, plan)."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """GRPO's settings."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Handed to an algorithm of your own."""


ALGORITHMS: dict[str, Callable[[AlgorithmConfig, StepPlan], Algorithm]] = {
    "grpo": lambda config, plan: GRPO(config.grpo, plan),
}


MEMBERS = ("needs", "entropy_grad", "reducer", "prepare", "assign_credit", "loss")
"""Of `Algorithm`."""


def build_algorithm(config: AlgorithmConfig, plan: StepPlan) -> Algorithm:
    """The configured algorithm.

    Raises:
        ValueError: if there is none of that name, or what it names makes no algorithm.
    """
    if config.name in ALGORITHMS:
        return ALGORITHMS[config.name](config, plan)
    if ":" not in config.name:
        raise ValueError(
            f"algo.name: there is no algorithm {config.name!r}; give one of {', '.join(ALGORITHMS)}, or module:factory"
        )
    factory = resolve_callable(config.name, kind="algorithm", given=["options", "plan"])
    algorithm = call_factory(factory, config.name, dict(config.options), plan, kind="algorithm")
    if not isinstance(algorithm, Algorithm):
        missing = [name for name in MEMBERS if not hasattr(algorithm, name)]
        raise ValueError(f"algorithm {config.name!r} made a {type(algorithm).__name__}, which has no {', '.join(missing)}")
    return algorithm


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "AlgorithmConfig",
    "LossFunction",
    "LossTerms",
    "Need",
    "StepPlan",
    "build_algorithm",
]
