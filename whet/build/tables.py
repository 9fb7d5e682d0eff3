"""The tables of auxiliary models in a run's settings, against the algorithm. Without torch: a mistake is answered before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from whet.algo.config import PPOConfig
from whet.algo.policy_config import PolicyConfig
from whet.settings.rl import RunConfig


def check_tables(config: RunConfig, reads: Mapping[str, bool]) -> None:
    """Refuse a model that the algorithm does not read, and an algorithm without its teacher.

    Args:
        config: the settings.
        reads: true for each of `teacher`, `reference` and `critic` that the algorithm reads.

    Raises:
        ValueError: with the setting, and what to do.
    """
    name = f"algo.name={config.algo.name}"
    if reads["teacher"] and config.teacher is None:
        raise ValueError(f"{name} distils from a teacher (distill_coef), but there is none: set teacher.path, or distill_coef=0")
    remedies = {
        "teacher": "does not learn from it: give its distill_coef a weight",
        "reference": "keeps none: give a KL a weight, set its reference=true",
        "critic": "needs no values: use ppo",
    }
    for table, remedy in remedies.items():
        if getattr(config, table) is not None and not reads[table]:
            raise ValueError(f"[{table}] is set, but {name} {remedy}, or drop [{table}]")


def check_tables_early(config: RunConfig) -> None:
    """`check_tables` for whet's own algorithms, whose settings say what they read."""
    algo = config.algo
    if isinstance(algo, PolicyConfig):
        reads = {"teacher": algo.distill_coef > 0, "reference": algo.keeps_reference, "critic": isinstance(algo, PPOConfig)}
        check_tables(config, reads)
