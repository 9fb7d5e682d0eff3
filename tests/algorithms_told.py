"""What docs/algorithms.md says beside its worked examples: defaults, constants, formulas."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter

import whet
from tests.algorithms_page import Page
from tests.algorithms_worked import settings
from whet.algo.base import StepPlan
from whet.algo.config import AlgorithmConfig, PPOConfig
from whet.algo.policy_config import PolicyConfig
from whet.algo.preference_config import DpoConfig, RewardModelConfig
from whet.algo.table import build_algorithm
from whet.core import advantages, losses, whiten
from whet.core.kl import KL_ESTIMATORS
from whet.settings.supervised import SupervisedRunConfig

SOURCE = Path(whet.__file__).parent
OWN = "Defaults, slime and verl"
SUPERVISED = {"dpo": (DpoConfig(), "Preferences"), "rm": (RewardModelConfig(), "Preferences"), "sft": (SupervisedRunConfig, "Supervised")}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, BaseModel):
            out |= flat(dict(value), f"{prefix}{name}.")
        elif name != "options":
            out[prefix + name] = list(value) if isinstance(value, tuple) else value
    return out


def defaults(config: BaseModel) -> dict[str, Any]:
    return flat(dict(config))


def policy_config(name: str) -> PolicyConfig:
    return build_algorithm(TypeAdapter(AlgorithmConfig).validate_python({"name": name}), StepPlan(1, max_tokens=8)).config


def told_defaults(here: Page) -> None:
    """What an algorithm has of its own, what all share, and what the losses of pairs and conversations have."""
    shared = defaults(PolicyConfig())
    for row in here.table(OWN, "name"):
        name, cell = row["name"].text.strip("`"), row["own defaults"]
        own = {key: value for key, value in defaults(policy_config(name)).items() if key != "name"}
        mine = {key: value for key, value in own.items() if key not in shared or shared[key] != value}
        assert flat_toml(cell.text) == mine, name
        here.see(cell.start, cell.start + len(cell.text))
    (given, unset) = here.found(r"Shared by all: ((?:.|\n)*?) Unset: ((?:.|\n)*?)\.\n")
    assert flat_toml(given.text) == {key: value for key, value in shared.items() if value is not None}
    assert set(re.findall(r"`([\w.]+)`", unset.text)) == {key for key, value in shared.items() if value is None}
    for name, (config, heading) in SUPERVISED.items():
        (row,) = [row for row in here.table(heading, "name") if row["name"].text == f"`{name}`"]
        for key, value in settings(row["defaults"].text).items():
            found = config.model_fields[key].default if isinstance(config, type) else getattr(config, key)
            assert found == value, f"{name}.{key}"
        if not isinstance(config, type):
            assert settings(row["defaults"].text).keys() == {key for key, value in config if value is not None}
        here.see(row["defaults"].start, row["defaults"].start + len(row["defaults"].text))


def flat_toml(text: str) -> dict[str, Any]:
    def walk(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in values.items():
            out |= walk(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return out

    return walk(settings(text))


def default_of(function: Any, name: str) -> float:
    return inspect.signature(function).parameters[name].default


def constants(here: Page) -> None:
    """Numbers that stand in the code."""
    here.says("| `grpo` | (r − mean) / (std + {}) |", default_of(advantages.group_advantages, "eps"))
    here.says("| the best: (r₁ − r₂) / (std + {}); the others 0 |", default_of(advantages.best_of_group, "eps"))
    here.says("(A − mean) / √(var + {}) over", default_of(whiten.whiten, "eps"))
    here.says("beyond e^{}, near the end of float32, its tangent goes on", losses.MAX_EXPONENT)
    here.says("verl clamps log ρ to ±{}, which", losses.MAX_LOG_RATIO)
    here.says("in its `token` form, is at most {} (verl)", losses.MAX_SEQUENCE_LOG_RATIO)
    large = KL_ESTIMATORS["low_var"](torch.tensor(-50.0), torch.tensor(0.0))
    here.says("k1 = d, k2 = d²/2, k3 = e^−d − 1 + d, `low_var` = k3 within ±{}, without", float(large))
    here.says("slime has no half and {}, verl a half and 0.5", PPOConfig().value_clip or 0.0)
    here.says("at temperature {}. For each", 0)
    for name in re.findall(r"arXiv (\d{4}\.\d{5})", here.text):
        known = any(name in path.read_text() for folder in ("algo", "core", "model") for path in (SOURCE / folder).glob("*.py"))
        assert known, f"no docstring names arXiv {name}"
    for found in re.finditer(r"arXiv \d{4}\.\d{5}", here.text):
        here.see(*found.span())


SAID = (
    "over a group, the valid trajectories of one prompt; std with n − 1 |",
    "| t, t + 1 | a time step and the next one |",
    "| return: r_t + γ G_{{t+1}} |",
    "r − mean of the others = n/(n−1) · (r − mean)",
    "trajectories with r ≠ 0, over the rollout",
    "(r − mean) / mean, for r ≥ 0",
    "W_t = Σ_{{j≤t}} (1 − 2p_j + Σ_v p_j(v)²)",
    "| G_t = r_t + γ G_{{t+1}}, whitened over the rollout |",
    "A_t = δ_t + γλ A_{{t+1}}, δ_t = r_t + γ V_{{t+1}} − V_t, whitened",
    "its advantage is 0 and it stops training",
    "in `core/advantages.py`), slime gives 0.",
    "its ratio to the engine is 1, and",
    "V after its last step is 0, unless `algo.bootstrap_truncated` is set",
    "ended by itself keeps the 0.",
    "with 1.0 where it is on, and with its sglang teacher the reward is 0.",
    "`grpo_vectorized` has max(var, 1e-6) under the root",
    "`rloo_vectorized` gives 0 |",
    "the baseline of a group of one is 0 |",
    "always whitens; `value_clip = 0.5` |",
    "warns where its eps is below 1 |",
    "slime's defaults are 0.2 for both clips, 0 for every KL and entropy weight, k1, `--gamma=1 --lambd=1`,",
    "verl's are 0.2 for both clips, 0.001 for its KL weights,",
    "Both truncate importance weights at 2.0 where these are on.",
    "are n · (k + 1) trajectories; k may be 1.",
    "that raised) is no 0. Its",
    "`distill_coef` > 0, with any algorithm",
    "so the first values are 0; a",
    "`critic_warmup = n` is n − 1 here)",
    "is 1 − Var(G − V)/Var(G), before",
    "max(−ρA, −clip(ρ, 1−`clip_low`, 1+`clip_high`) A); for A < 0 at most −`clip_dual`·A",
    "vanilla, dual clip 3.0 always",
    "−(4/τ) σ(τ(ρ−1)) A, τ by the sign of A",
    "drops tokens with A < 0 from samples",
    "a pair weighs 1 / pairs of the step.",
    "margin m (0 unless `data.margin_key` names one",
    "−(1−s) log σ(βh − m) − s log σ(m − βh), s = `label_smoothing`; with `loss = \"ipo\"` (h − 1/(2β))²",
    "deviation 1/√(H+1) (",
    "a turn with `step_loss_mask` 0 is context",
    "| 1 / trained tokens of its trajectory / valid trajectories |",
    "| `token_mean` | 1 / trained tokens |",
    "| 1 / trained tokens of its group / groups |",
    "| `token_sum_mean` | 1 / valid trajectories |",
    "| 1 / trained tokens of its sample / samples that train |",
    "| `sequence_sum` | 1 / samples that train |",
    "| 1 / `reducer_scale` / valid trajectories |",
    "| `constant` | 1 / `reducer_scale` |",
    "icepop (0 outside)",
    "where the step after token 4 is token 7, and whitened",
    "Over `all` tokens the step after token 4 is token 5,",
    "Reply 3, by column",
    "by the token's log π, 0 where the clip took effect",
    "The second token of reply 2 got",
    "Reply 3's token:",
    "so that Σ p² = p² + (1−p)².",
    "Token 2 of reply 2, whose",
)
"""Formulas and other implementations' numbers: what they stand for cannot be computed here, so they are told twice."""


def formulas(here: Page) -> None:
    for phrase in SAID:
        here.says(phrase)


TOLD = (told_defaults, constants, formulas)
