"""KL estimators, the KL in the reward, and the controller of its coefficient."""

from __future__ import annotations

import torch

from tests.parity.golden_batches import Rows, by_source, gradient, leaf
from whet.core.kl import KL_ESTIMATORS, adapted_kl_coef
from whet.core.segments import per_sample_mean

SLIME_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "low_var"}
VERL_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var", "k3": "low_var"}


def slime_kl(case):
    given, estimate = case["inputs"], KL_ESTIMATORS[SLIME_KL[case["params"]["kl_loss_type"]]]
    logprobs, ref = leaf(given["log_probs"]), torch.tensor(given["log_probs_base"])
    weights = given["importance_ratio"]
    kl = estimate(logprobs, ref, None if weights is None else torch.tensor(weights))
    return {"kl": kl, "grad_log_probs_of_sum": gradient(kl.sum(), logprobs)}


def verl_kl_penalty(case):
    given, name = case["inputs"], case["params"]["kl_penalty"]
    if name not in VERL_KL:
        raise ValueError(f"there is no KL estimator {name!r}")
    logprobs, ref = leaf(given["logprob"]), torch.tensor(given["ref_logprob"])
    kl = KL_ESTIMATORS[VERL_KL[name]](logprobs, ref.flatten()).reshape(ref.shape)
    return {"kl": kl, "grad_logprob_of_sum": gradient(kl.sum(), logprobs).reshape(ref.shape)}


def verl_rewards(case):
    given = case["inputs"]
    scores, logprobs, ref = (torch.tensor(given[name]) for name in ("token_level_scores", "old_log_prob", "ref_log_prob"))
    return {"rewards": scores - case["params"]["kl_ratio"] * KL_ESTIMATORS["k1"](logprobs, ref)}


def verl_apply_kl(case):
    """The KL in the reward; verl's controller looks at the mean over rows of their means."""
    given, params = case["inputs"], case["params"]
    rows = Rows(given["response_mask"])
    kl = KL_ESTIMATORS[VERL_KL[params["kl_penalty"]]](rows.column(given["old_log_probs"]), rows.column(given["ref_log_prob"]))
    coef, mean = params["kl_coef"], float(per_sample_mean(rows.batch, kl).mean())
    after = coef
    if params["type"] == "adaptive":
        after = adapted_kl_coef(coef, mean, len(rows.lengths), target=params["target_kl"], horizon=params["horizon"])
    return {
        "token_level_rewards": rows.rows(rows.column(given["token_level_scores"]) - coef * kl * rows.batch.loss_mask),
        "metrics": {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coef},
        "controller_value_after": after,
    }


def verl_controllers(case):
    given, params = case["inputs"], case["params"]
    coef, adaptive = params["init_kl_coef"], []
    for kl, num in zip(given["current_kl"], given["n_steps"], strict=True):
        coef = adapted_kl_coef(coef, kl, num, target=params["target_kl"], horizon=params["horizon"])
        adaptive.append(coef)
    return {"adaptive": adaptive, "fixed": [params["init_kl_coef"]] * len(adaptive)}


ADAPTERS = {
    "slime_kl": by_source({"compute_approx_kl": slime_kl}),
    "verl_kl": by_source(
        {
            "kl_penalty": verl_kl_penalty,
            "compute_rewards": verl_rewards,
            "apply_kl_penalty": verl_apply_kl,
            "KLController": verl_controllers,
        }
    ),
}
