"""Algorithms, one file each, in an explicit table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, model_validator

from whet.algo.base import Algorithm, LossFunction, LossTerms, Need, StepPlan
from whet.algo.cispo import CISPOConfig
from whet.algo.dr_grpo import DrGRPOConfig
from whet.algo.gmpo import GMPOConfig
from whet.algo.gpg import GPGConfig, gpg
from whet.algo.grpo import GRPOConfig, grpo
from whet.algo.grpo_passk import grpo_passk
from whet.algo.gspo import GSPOConfig
from whet.algo.maxrl import MaxRLConfig, maxrl
from whet.algo.opo import OPOConfig, opo
from whet.algo.otb import OTBConfig, otb
from whet.algo.ppo import PPOConfig, ppo
from whet.algo.reinforce_plus_plus import ReinforcePlusPlusConfig, reinforce_plus_plus
from whet.algo.reinforce_plus_plus_baseline import ReinforcePlusPlusBaselineConfig, reinforce_plus_plus_baseline
from whet.algo.remax import ReMaxConfig, remax
from whet.algo.rloo import RLOOConfig, rloo
from whet.algo.sapo import SAPOConfig
from whet.config import Config, call_factory, changed_settings, refuse_unread, resolve_callable
from whet.config.errors import show


class AlgorithmConfig(Config):
    """Which algorithm, and its settings."""

    name: str = "grpo"
    """A built-in algorithm, or an import reference `module:factory` called with (options, plan)."""
    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """GRPO's settings."""
    dr_grpo: DrGRPOConfig | None = None
    """Dr.GRPO's settings."""
    gspo: GSPOConfig | None = None
    """GSPO's settings."""
    cispo: CISPOConfig | None = None
    """CISPO's settings."""
    sapo: SAPOConfig | None = None
    """SAPO's settings."""
    gmpo: GMPOConfig | None = None
    """GMPO's settings."""
    grpo_passk: GRPOConfig | None = None
    """Settings of GRPO for pass@k."""
    rloo: RLOOConfig | None = None
    """RLOO's settings."""
    opo: OPOConfig | None = None
    """OPO's settings."""
    gpg: GPGConfig | None = None
    """GPG's settings."""
    maxrl: MaxRLConfig | None = None
    """MaxRL's settings."""
    otb: OTBConfig | None = None
    """The optimal token baseline's settings."""
    remax: ReMaxConfig | None = None
    """ReMax's settings."""
    reinforce_plus_plus: ReinforcePlusPlusConfig | None = None
    """REINFORCE++'s settings."""
    reinforce_plus_plus_baseline: ReinforcePlusPlusBaselineConfig | None = None
    """REINFORCE++-baseline's settings."""
    ppo: PPOConfig | None = None
    """PPO's settings."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Handed to an algorithm of your own."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> AlgorithmConfig:
        own = ":" in self.name
        if self.name not in ALGORITHMS and not own:
            return self  # There is no such algorithm, which is what the user should hear.
        if not own:
            refuse_unread(self, ["options"], f"with name={self.name}, which is built in", f"write its settings below [algo.{self.name}]")
        instead = "an algorithm of your own is given [algo.options] alone" if own else f"it reads [algo.{self.name}] alone"
        for other in ALGORITHMS:
            table: Config | None = getattr(self, other)
            if other == self.name or table is None:
                continue
            changed = ", ".join(f"{key}={show(value)}" for key, value in changed_settings(table, type(table)()))
            if changed:
                found = f"[algo.{other}] ({changed}) has no effect with name={self.name}"
                raise ValueError(f"{found}: {instead}; move what it sets, or drop it")
        return self


ALGORITHMS: dict[str, Callable[[AlgorithmConfig, StepPlan], Algorithm]] = {
    "grpo": lambda config, plan: grpo(config.grpo, plan),
    "dr_grpo": lambda config, plan: grpo(config.dr_grpo or DrGRPOConfig(), plan, "dr_grpo"),
    "gspo": lambda config, plan: grpo(config.gspo or GSPOConfig(), plan, "gspo"),
    "cispo": lambda config, plan: grpo(config.cispo or CISPOConfig(), plan, "cispo"),
    "sapo": lambda config, plan: grpo(config.sapo or SAPOConfig(), plan, "sapo"),
    "gmpo": lambda config, plan: grpo(config.gmpo or GMPOConfig(), plan, "gmpo"),
    "grpo_passk": lambda config, plan: grpo_passk(config.grpo_passk or GRPOConfig(), plan),
    "rloo": lambda config, plan: rloo(config.rloo or RLOOConfig(), plan),
    "opo": lambda config, plan: opo(config.opo or OPOConfig(), plan),
    "gpg": lambda config, plan: gpg(config.gpg or GPGConfig(), plan),
    "maxrl": lambda config, plan: maxrl(config.maxrl or MaxRLConfig(), plan),
    "otb": lambda config, plan: otb(config.otb or OTBConfig(), plan),
    "remax": lambda config, plan: remax(config.remax or ReMaxConfig(), plan),
    "reinforce_plus_plus": lambda config, plan: reinforce_plus_plus(
        config.reinforce_plus_plus or ReinforcePlusPlusConfig(), plan
    ),
    "reinforce_plus_plus_baseline": lambda config, plan: reinforce_plus_plus_baseline(
        config.reinforce_plus_plus_baseline or ReinforcePlusPlusBaselineConfig(), plan
    ),
    "ppo": lambda config, plan: ppo(config.ppo or PPOConfig(), plan),
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
    "GRPOConfig",
    "LossFunction",
    "LossTerms",
    "Need",
    "StepPlan",
    "build_algorithm",
]
