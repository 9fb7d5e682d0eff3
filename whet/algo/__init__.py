"""Algorithms, one file each, in an explicit table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field

from whet.algo.base import Algorithm, LossFunction, LossTerms, Need, StepPlan
from whet.algo.grpo import GRPO, GRPOConfig
from whet.config import Config, resolve


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


def build_algorithm(config: AlgorithmConfig, plan: StepPlan) -> Algorithm:
    """The configured algorithm.

    Raises:
        ValueError: if there is none of that name.
    """
    if config.name in ALGORITHMS:
        return ALGORITHMS[config.name](config, plan)
    if ":" not in config.name:
        raise ValueError(
            f"algo.name: there is no algorithm {config.name!r}; give one of {', '.join(ALGORITHMS)}, or module:factory"
        )
    return resolve(config.name, kind="algorithm")(dict(config.options), plan)


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
