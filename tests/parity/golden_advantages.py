"""Group statistics, returns, GAE, token baselines, distillation and whitening."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.parity.golden_batches import Rows, by_source
from tests.parity.golden_kl import SLIME_KL
from whet.core.advantages import (
    best_of_group,
    group_advantages,
    leave_one_out,
    length_weighted,
    scaled_by_nonzero,
)
from whet.core.distill import distilled
from whet.core.kl import KL_ESTIMATORS
from whet.core.returns import discounted_returns, gae, rewards_on_tokens, turn_returns
from whet.core.token_baseline import optimal_token_baseline
from whet.core.weights import sample_mean
from whet.core.whiten import masked_mean, masked_var, whiten

# slime: rewards of a rollout


def group_norm(case):
    raw, params = case["inputs"]["rewards"], case["params"]
    return {"raw_rewards": raw, "rewards": _slime_rewards(raw, params)}


def to_train_data(case):
    """slime's samples as whet's: a removed one trains nothing, but stays in its group's statistics."""
    given, params = case["inputs"], case["params"]
    masks = [
        [0] * length if removed else (mask or [1] * length)
        for mask, length, removed in zip(given["loss_mask"], given["response_lengths"], given["remove_sample"], strict=True)
    ]
    owners = [i if name is None else name for i, name in enumerate(given["rollout_id"])]
    rows = Rows(masks, owners=owners, rewards=given["rewards"])
    weights = sample_mean(rows.batch, total=1.0)
    per_sample = [max(piece) for piece in rows.rows(weights)]
    sums = [0 if w == 0 else round(1 / w) for w in per_sample]
    by_owner = {owner: total for owner, total in zip(owners, sums, strict=True) if total}
    return {
        "rewards": _slime_rewards(given["rewards"], params),
        "raw_reward": given["rewards"],
        "truncated": [int(status == "truncated") for status in given["status"]],
        "sample_indices": list(range(len(masks))),
        "rollout_ids": owners,
        "loss_masks": rows.rows(rows.batch.loss_mask.int()),
        "rollout_mask_sums": [by_owner.get(owner, 0) for owner in owners],
        "response_lengths": rows.lengths,
    }


def _slime_rewards(raw: list[float], params: dict[str, Any]) -> list[float]:
    estimator = params["advantage_estimator"]
    if not params["rewards_normalization"] or estimator not in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"):
        return raw
    size = params["n_samples_per_prompt"]
    whole = len(raw) != size * params["rollout_batch_size"]
    rows = Rows([[1]] * len(raw), groups=[0 if whole else i // size for i in range(len(raw))], rewards=raw)
    normalize = params["grpo_std_normalization"] and estimator != "reinforce_plus_plus_baseline"
    return group_advantages(rows.batch, normalize_std=normalize).tolist()


# slime: returns


def grpo_returns(case):
    rows = Rows([[1] * len(kl) for kl in case["inputs"]["kl"]], rewards=case["inputs"]["rewards"])
    return {"returns": rows.per_row(rows.batch.rewards)}


def reinforce_pp_returns(case):
    given, params = case["inputs"], case["params"]
    rows = Rows(given["loss_masks"], rewards=given["rewards"])
    return {"returns": rows.rows(_slime_plus_plus(rows, rows.column(given["kl"]), params["kl_coef"], params["gamma"]))}


def _slime_plus_plus(rows: Rows, kl: Tensor, kl_coef: float, gamma: float) -> Tensor:
    """Every token is a step; the KL counts on trained ones only, the reward on the last of them."""
    batch = rows.batch.with_(token_rewards=-kl_coef * kl * rows.batch.loss_mask)
    return discounted_returns(batch, rewards_on_tokens(batch), rows.responses, gamma)


def reinforce_pp_baseline(case):
    given = case["inputs"]
    rows = Rows(given["loss_masks"], rewards=given["rewards"])
    per_token = rows.batch.rewards[rows.batch.sample_of_token] - case["params"]["kl_coef"] * rows.column(given["kl"])
    return {"advantages": rows.rows(per_token)}


def gae_batch(case):
    given, params = case["inputs"], case["params"]
    rows = Rows([[1] * len(values) for values in given["values"]])
    batch = rows.batch.with_(values=rows.column(given["values"]))
    found = gae(batch, rows.column(given["token_rewards"]), rows.responses, gamma=params["gamma"], lam=params["lambd"])
    return dict(zip(("advantages", "returns"), map(rows.rows, found), strict=True))


def gae_long(case):
    given, params = case["inputs"], case["params"]
    found = gae_batch({"inputs": given | {"token_rewards": given["rewards"]}, "params": params})
    return {f"{name}_{form}": found[name] for name in ("advantages", "returns") for form in ("chunked", "vanilla")}


def slime_advantages(case):
    """compute_advantages_and_returns: KL, estimator, distillation, whitening, in this order."""
    given, params = case["inputs"], case["params"]
    rows = Rows(given["loss_masks"], rewards=given["rewards"])
    batch = rows.batch
    logprobs = rows.column(given["rollout_log_probs" if params["use_rollout_logprobs"] else "log_probs"])
    kl = torch.zeros_like(logprobs)
    if params["kl_coef"] != 0:
        kl = KL_ESTIMATORS[SLIME_KL[params["kl_loss_type"]]](logprobs, rows.column(given["ref_log_probs"]))
    name = params["advantage_estimator"]
    if name == "ppo":
        batch = batch.with_(values=rows.column(given["values"]), token_rewards=-params["kl_coef"] * kl)
        rewards = rewards_on_tokens(batch, "last_token")
        advantages, returns = gae(batch, rewards, rows.responses, gamma=params["gamma"], lam=params["lambd"])
    elif name == "reinforce_plus_plus":
        advantages = returns = _slime_plus_plus(rows, kl, params["kl_coef"], params["gamma"])
    elif name in ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"):
        penalty = params["kl_coef"] * kl if name == "reinforce_plus_plus_baseline" else 0.0
        advantages = returns = batch.rewards[batch.sample_of_token] - penalty
    else:
        raise ValueError(f"no estimator {name!r}")
    out = {"kl": rows.rows(kl)}
    if params["use_opd"]:
        teacher = rows.column(given["teacher_log_probs"])
        advantages = distilled(advantages, logprobs, teacher, params["opd_kl_coef"])
        if name == "reinforce_plus_plus_baseline":
            returns = advantages  # one list in slime; without a critic nothing reads it
        out["opd_reverse_kl"] = rows.rows(logprobs - teacher)
    if params["normalize_advantages"]:
        advantages = whiten(advantages, batch.loss_mask)
    return out | {"advantages": rows.rows(advantages), "returns": rows.rows(returns)}


def slime_whiten(case):
    given, params = case["inputs"], case["params"]
    values, mask = torch.tensor(given["values"]), torch.tensor(given["mask"]).bool()
    return {"whitened": whiten(values, mask, shift_mean=params["shift_mean"], eps=params["epsilon"])}


# verl: estimators over padded rows


def verl_rows(case) -> Rows:
    """Rows with their token rewards, which are all of their score."""
    given = case["inputs"]
    rows = Rows(given["response_mask"], groups=given.get("index"))
    rows.batch = rows.batch.with_(token_rewards=rows.column(given["token_level_rewards"]))
    return rows


def outcome(estimate: Callable[..., Tensor]) -> Callable[[Any], Any]:
    """An estimator of one number per row."""

    def adapter(case):
        rows = verl_rows(case)
        per_row = estimate(rows.batch, case["params"])
        advantages = rows.rows(per_row[rows.batch.sample_of_token] * rows.batch.loss_mask)
        return {"advantages": advantages, "returns": advantages}

    return adapter


def _grpo(batch, params, std_floor=0.0):
    normalize, eps = params.get("norm_adv_by_std_in_grpo", True), params.get("epsilon", 1e-6)
    return group_advantages(batch, normalize_std=normalize, eps=eps, std_floor=std_floor, singleton="raw")


def _passk(batch, params):
    normalize, eps = params.get("norm_adv_by_std_in_grpo", True), params.get("epsilon", 1e-6)
    return best_of_group(batch, normalize_std=normalize, eps=eps, singleton="refuse")


def verl_plus_plus_baseline(case):
    rows = verl_rows(case)
    owner, mask = rows.batch.sample_of_token, rows.batch.loss_mask
    per_token = group_advantages(rows.batch, normalize_std=False, singleton="raw")[owner]
    advantages = rows.rows(whiten(per_token, mask) * mask)
    return {"advantages": advantages, "returns": advantages}


def verl_plus_plus(case):
    rows = verl_rows(case)
    returns = turn_returns(rows.batch, rewards_on_tokens(rows.batch), case["params"]["gamma"])
    mask = rows.batch.loss_mask
    return {"advantages": rows.rows(whiten(returns, mask) * mask), "returns": rows.rows(returns)}


def verl_gae(case):
    rows = verl_rows(case)
    batch, mask = rows.batch.with_(values=rows.column(case["inputs"]["values"])), rows.batch.loss_mask
    rewards = rewards_on_tokens(batch)
    advantages, returns = gae(batch, rewards, mask, gamma=case["params"]["gamma"], lam=case["params"]["lam"])
    return {"advantages": rows.rows(whiten(advantages, mask)), "returns": rows.rows(returns)}


def verl_remax(case):
    rows = verl_rows(case)
    batch, mask = rows.batch, rows.batch.loss_mask
    returns = discounted_returns(batch, rewards_on_tokens(batch), mask)
    baseline = torch.tensor(case["inputs"]["reward_baselines"], dtype=torch.float64)[batch.sample_of_token]
    return {"advantages": rows.rows(returns - baseline * mask), "returns": rows.rows(returns)}


def token_baseline(align: str) -> Callable[[Any], Any]:
    def adapter(case):
        rows, given, params = verl_rows(case), case["inputs"], case["params"]
        weights = given["rollout_is_weights"]
        batch = rows.batch.with_(
            squared_probs=rows.column(given["sum_pi_squared"]),
            correction=None if weights is None else rows.column(weights),
        )
        returns = discounted_returns(batch, rewards_on_tokens(batch), batch.loss_mask)
        baseline = optimal_token_baseline(
            batch,
            returns,
            rows.column(given["old_log_probs"]),
            align=align,
            zero_tail=params["handle_zero_tail"],
            eps=params["epsilon"],
        )
        return {"advantages": rows.rows((returns - baseline) * batch.loss_mask), "returns": rows.rows(returns)}

    return adapter


def verl_masked_statistics(case):
    values, mask = torch.tensor(case["inputs"]["values"]), torch.tensor(case["inputs"]["mask"]).bool()
    return {
        "mean": masked_mean(values, mask),
        "mean_axis-1": [masked_mean(v, m) for v, m in zip(values, mask, strict=True)],
        "var_unbiased": masked_var(values, mask),
        "var_biased": masked_var(values, mask, unbiased=False),
        "sum": (values * mask).sum(),
        "sum_axis-1": (values * mask).sum(-1),
    }


def verl_whiten(case):
    values, mask = torch.tensor(case["inputs"]["values"]), torch.tensor(case["inputs"]["mask"]).bool()
    whitened = whiten(values.flatten(), mask.flatten(), shift_mean=case["params"]["shift_mean"])
    return {"out": whitened.reshape(values.shape)}


def verl_logprobs(case):
    from whet.core.logprobs import logprobs_and_entropy

    logits, labels = torch.tensor(case["inputs"]["logits"]), torch.tensor(case["inputs"]["labels"])
    flat = logits.reshape(-1, logits.shape[-1])
    found = logprobs_and_entropy(flat, labels.reshape(-1), torch.ones(len(flat)))
    return {name: column.reshape(labels.shape) for name, column in zip(("logprobs", "entropy"), found, strict=True)}


ADAPTERS = {
    "slime_group_norm": by_source({"_post_process_rewards": group_norm, "_convert_samples_to_train_data": to_train_data}),
    "slime_returns_gae": by_source(
        {
            "get_grpo_returns": grpo_returns,
            "get_reinforce_plus_plus_returns": reinforce_pp_returns,
            "get_reinforce_plus_plus_baseline_advantages": reinforce_pp_baseline,
            "get_advantages_and_returns_batch": gae_batch,
            "chunked_gae": gae_long,
        }
    ),
    "slime_advantages": by_source({"compute_advantages_and_returns": slime_advantages}),
    "slime_whiten": by_source({"distributed_masked_whiten": slime_whiten}),
    "verl_advantages": by_source(
        {
            "compute_gae_advantage_return": verl_gae,
            "compute_grpo_outcome_advantage": outcome(_grpo),
            "compute_grpo_vectorized_outcome_advantage": outcome(lambda b, p: _grpo(b, p, std_floor=1e-3)),
            "compute_grpo_passk_outcome_advantage": outcome(_passk),
            "compute_rloo_outcome_advantage": outcome(lambda b, p: leave_one_out(b, singleton="raw")),
            "compute_rloo_vectorized_outcome_advantage": outcome(lambda b, p: leave_one_out(b)),
            "compute_opo_outcome_advantage": outcome(lambda b, p: length_weighted(b, singleton="raw")),
            "compute_gpg_outcome_advantage": outcome(lambda b, p: scaled_by_nonzero(b, singleton="raw")),
            "compute_reinforce_plus_plus_outcome_advantage": verl_plus_plus,
            "compute_reinforce_plus_plus_baseline_outcome_advantage": verl_plus_plus_baseline,
            "compute_remax_outcome_advantage": verl_remax,
            "compute_optimal_token_baseline_advantage": token_baseline("position"),
            "compute_multi_turn_optimal_token_baseline_advantage": token_baseline("action"),
        }
    ),
    "verl_torch_functional": by_source(
        {"masked_whiten": verl_whiten, "masked_mean/masked_var": verl_masked_statistics, "logprobs_from_logits": verl_logprobs}
    ),
}
