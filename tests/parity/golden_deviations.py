"""The one table of cases that whet answers differently on purpose: why, and what whet answers instead.

Whet's own answers are worked out here in plain Python, without whet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Case = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Deviation:
    """A kind of case, the reason, and whet's own right answer."""

    applies: Callable[[str, Case], bool]
    """Given the file's stem and the case."""
    why: str
    """The case's `peer_defect`, or the rule that forbids the peer's answer."""
    answer: Callable[[Case], Any]
    """The outputs that are right."""


def deviation_of(stem: str, case: Case) -> Deviation | None:
    """The entry for a case, if there is one."""
    return next((entry for entry in DEVIATIONS if entry.applies(stem, case)), None)


def _raised(case: Case) -> bool:
    return isinstance(case["outputs"], Mapping) and "error" in case["outputs"]


def _has_masked_row(case: Case) -> bool:
    return any(not any(mask) for mask in case["inputs"].get("loss_masks", ()))


def _plus_plus(stem: str, case: Case) -> bool:
    mine = case["params"].get("advantage_estimator") == "reinforce_plus_plus" or "reinforce_plus_plus_returns" in case["source"]
    return stem in ("slime_returns_gae", "slime_advantages") and mine and _raised(case) and _has_masked_row(case)


def _plus_plus_returns(rewards: list[float], kl: list[list[float]], masks: list[list[int]], coef: float, gamma: float) -> Any:
    """A row without a trained token has no place for its reward, and returns of 0."""
    out = []
    for reward, drift, mask in zip(rewards, kl, masks, strict=True):
        earned = [-coef * d * m for d, m in zip(drift, mask, strict=True)]
        if any(mask):
            earned[max(i for i, m in enumerate(mask) if m)] += reward
        running, row = 0.0, []
        for r in reversed(earned):
            running = r + gamma * running
            row.append(running)
        out.append(row[::-1])
    return out


def _plus_plus_answer(case: Case) -> Any:
    given, params = case["inputs"], case["params"]
    masks, rewards = given["loss_masks"], given["rewards"]
    if "advantage_estimator" not in params:
        return {"returns": _plus_plus_returns(rewards, given["kl"], masks, params["kl_coef"], params["gamma"])}
    logprobs = given["rollout_log_probs" if params["use_rollout_logprobs"] else "log_probs"]
    estimate: dict[str, Callable[[float], float]] = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.expm1(-d) + d,
        "low_var_kl": lambda d: min(math.expm1(-d) + d, 10.0),
    }
    of = estimate[params["kl_loss_type"]] if params["kl_coef"] else lambda d: 0.0
    kl = [[of(a - b) for a, b in zip(*rows, strict=True)] for rows in zip(logprobs, given["ref_log_probs"], strict=True)]
    returns = _plus_plus_returns(rewards, kl, masks, params["kl_coef"], params["gamma"])
    out: dict[str, Any] = {"kl": kl, "returns": returns}
    advantages = returns
    if params["use_opd"]:
        reverse = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(logprobs, given["teacher_log_probs"], strict=True)]
        advantages = [
            [a - params["opd_kl_coef"] * d for a, d in zip(*rows, strict=True)] for rows in zip(returns, reverse, strict=True)
        ]
        out["opd_reverse_kl"] = reverse
    if params["normalize_advantages"]:
        used = [a for row, mask in zip(advantages, masks, strict=True) for a, m in zip(row, mask, strict=True) if m]
        mean = sum(used) / len(used)
        var = sum((a - mean) ** 2 for a in used) / (len(used) - 1)
        advantages = [[(a - mean) / math.sqrt(var + 1e-8) for a in row] for row in advantages]
    return out | {"advantages": advantages}


def _zero_over_zero(stem: str, case: Case) -> bool:
    """verl divided by a number of tokens or sequences that is 0."""
    if not stem.startswith("verl_"):
        return False
    masks = next((case["inputs"][name] for name in ("response_mask", "loss_mask") if name in case["inputs"]), ())
    empty = any(not any(mask) for mask in masks) or case["params"].get("rollout_rs") is not None
    return empty and _has_nan(case["outputs"])


def _has_nan(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def _nan_is_zero(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nan_is_zero(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nan_is_zero(item) for item in value]
    return 0.0 if isinstance(value, float) and math.isnan(value) else value


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        _plus_plus,
        "slime stops with an assertion where all tokens of a sample are masked. A trajectory that trains nothing is data to whet, "
        "not an error: it has no returns, and the other samples have theirs.",
        _plus_plus_answer,
    ),
    Deviation(
        _zero_over_zero,
        "Over nothing but masked or rejected tokens verl's means are 0 / 0, and NaN times a mask of 0 is still NaN. A sum over no "
        "tokens is 0 in whet: a masked row must not turn a loss, a gradient or a neighbour's advantage into NaN.",
        lambda case: _nan_is_zero(case["outputs"]),
    ),
)
