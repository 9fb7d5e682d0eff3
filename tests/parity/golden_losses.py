"""Policy and value losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parity.golden_batches import Rows, by_source, gradient, leaf
from tests.parity.golden_reducers import verl_weights
from whet.core.correction import geometric_weight
from whet.core.covariance import clip_cov, covariances, draws_of, kl_cov, pick_between, pick_largest, share_of
from whet.core.losses import (
    MAX_LOG_RATIO,
    ClipTerms,
    cispo,
    clipped_surrogate,
    clipped_terms,
    geometric_mean,
    reinforce,
    sapo,
    sequence_log_ratio,
    sequence_mask,
    value_loss,
)
from whet.core.segments import per_sample_count
from whet.core.weights import sample_mean
from whet.core.whiten import masked_mean

# slime


def slime_policy_loss(case):
    given, params = case["inputs"], case["params"]
    logprobs, old, advantages = leaf(given["log_probs"]), torch.tensor(given["old_log_probs"]), torch.tensor(given["advantages"])
    found = clipped_surrogate(logprobs, old, advantages, params["eps_clip"], params["eps_clip_high"], params["eps_clip_c"])
    return {
        "pg_losses": found.terms,
        "clipfrac": (found.clipped & ~found.dual).float(),
        "grad_log_probs_of_sum": gradient(found.terms.sum(), logprobs),
    }


def slime_cispo(case):
    given, params = case["inputs"], case["params"]
    logprobs, old, advantages = leaf(given["log_probs"]), torch.tensor(given["old_log_probs"]), torch.tensor(given["advantages"])
    found = cispo(logprobs, old, advantages, params["eps_clip"], params["eps_clip_high"])
    return {
        "pg_losses": found.terms,
        "clipfrac": found.clipped.float(),
        "grad_log_probs_of_sum": gradient(found.terms.sum(), logprobs),
    }


def slime_gspo_kl(case):
    """slime's `ppo_kl` is log pi_old - log pi."""
    rows, logprobs, old = _slime_sequences(case)
    drift = -rows.flat(sequence_log_ratio(rows.batch, rows.column(logprobs), old, "sequence"))
    return {"ppo_kl": drift, "grad_log_probs_of_sum": _split(rows, gradient(drift.sum(), logprobs))}


def slime_gspo_loss(case):
    rows, logprobs, old = _slime_sequences(case)
    log_ratio = sequence_log_ratio(rows.batch, rows.column(logprobs), old, "sequence")
    params = case["params"]
    found = clipped_terms(log_ratio, rows.column(case["inputs"]["advantages"]), params["eps_clip"], params["eps_clip_high"])
    masked_sum = (found.terms * rows.batch.loss_mask).sum()
    return {
        "pg_losses": rows.flat(found.terms),
        "clipfrac": rows.flat(found.clipped).float(),
        "grad_log_probs_of_masked_sum": _split(rows, gradient(masked_sum, logprobs)),
    }


def slime_opsm(case):
    """slime counts masked entries of any origin over the trained ones."""
    rows, logprobs, old = _slime_sequences(case)
    advantages = rows.column(case["inputs"]["advantages"])
    keep = sequence_mask(rows.batch, rows.column(logprobs), old, advantages, case["params"]["opsm_delta"])
    dropped = per_sample_count(rows.batch, ~keep & rows.responses) / per_sample_count(rows.batch).clamp(min=1)
    return {"opsm_mask": rows.flat(keep).float(), "opsm_clipfrac": dropped.sum()}


def _slime_sequences(case) -> tuple[Rows, Tensor, Tensor]:
    rows = Rows(case["inputs"]["loss_masks"])
    return rows, leaf(case["inputs"]["log_probs"]), rows.column(case["inputs"]["old_log_probs"])


def _split(rows: Rows, flat: Tensor) -> list[list[float]]:
    return [piece.tolist() for piece in flat.split(rows.lengths)]


# verl


def verl_policy_loss(case):
    """A policy loss by its name in the source, with importance weights on its terms."""
    given, params = case["inputs"], case["params"]
    name = case["source"].split("'")[1]
    rows, logprobs = Rows(given["response_mask"]), leaf(given["log_prob"])
    weights = given["rollout_is_weights"]
    correction = torch.ones(rows.batch.num_tokens) if weights is None else rows.column(weights)
    column, old, advantages = rows.column(logprobs), rows.column(given["old_log_prob"]), rows.column(given["advantages"])
    found = VERL_LOSSES[name](rows, column, old, advantages, params)
    mode, info = params["loss_agg_mode"], params["global_batch_info"]
    if name in ("gspo", "sapo"):
        mode = "seq-mean-token-mean"
    if name == "geo_mean":
        correction = geometric_weight(rows.batch, correction)
        reduce = sample_mean(rows.batch)
    else:
        reduce = verl_weights(rows.batch, mode, max(rows.lengths), info)
    loss = (reduce * found.terms * correction).sum()
    metrics = _verl_metrics(name, rows, column.detach(), old, advantages, found)
    return {"loss": loss, "metrics": metrics, "grad_log_prob": _split(rows, gradient(loss, logprobs))}


def _clips(params: dict[str, Any]) -> tuple[float, float]:
    low, high = params.get("clip_ratio_low"), params.get("clip_ratio_high")
    return (params["clip_ratio"] if low is None else low), (params["clip_ratio"] if high is None else high)


def _vanilla(rows, logprobs, old, advantages, params):
    return clipped_surrogate(logprobs, old, advantages, *_clips(params), params["clip_ratio_c"])


def _gspo(rows, logprobs, old, advantages, params):
    return clipped_terms(sequence_log_ratio(rows.batch, logprobs, old, "token"), advantages, *_clips(params))


def _clip_cov(rows, logprobs, old, advantages, params):
    """verl leaves out of its choice what the ratio's clip already stopped."""
    mask = rows.batch.loss_mask
    free = mask & ~clipped_surrogate(logprobs.detach(), old, advantages, *_clips(params)).clipped
    draws = torch.randperm(len(mask), generator=torch.Generator().manual_seed(0))
    wanted = share_of(mask, params["clip_cov_ratio"])
    covariance = covariances(logprobs, advantages, mask)
    chosen = pick_between(free, covariance, wanted, params["clip_cov_lb"], params["clip_cov_ub"], draws)
    return clip_cov(logprobs, old, advantages, chosen, *_clips(params))


def _kl_cov(rows, logprobs, old, advantages, params):
    mask = rows.batch.loss_mask
    wanted = share_of(mask, params["kl_cov_ratio"])
    chosen = pick_largest(mask, covariances(logprobs, advantages, mask), wanted, draws_of(rows.batch))
    return kl_cov(logprobs, old, advantages, chosen, params["ppo_kl_coef"])


VERL_LOSSES = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "sapo": lambda rows, lp, old, adv, params: sapo(lp, old, adv, params["tau_pos"], params["tau_neg"]),
    "gpg": lambda rows, lp, old, adv, params: reinforce(lp, old, adv),
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "geo_mean": lambda rows, lp, old, adv, params: geometric_mean(rows.batch, lp, old, adv, *_clips(params)),
    "cispo": lambda rows, lp, old, adv, params: cispo(lp, old, adv, *_clips(params)),
}


def _verl_metrics(name: str, rows: Rows, logprobs: Tensor, old: Tensor, advantages: Tensor, found: ClipTerms) -> dict[str, Any]:
    """What verl logs: shares of clipped tokens and the k1 estimate of KL(old || current)."""
    mask = rows.batch.loss_mask
    drift = old - logprobs if name in ("gspo", "clip_cov", "kl_cov", "geo_mean") else (old - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def share(which: Tensor) -> Tensor:
        return masked_mean(which.float(), mask)

    if name == "gpg":
        return {}
    if name == "kl_cov":
        return {"actor/ppo_kl": masked_mean(drift.abs(), mask)}
    if name == "clip_cov":
        return {"actor/pg_clipfrac": share(found.terms.detach().eq(0) & found.clipped), "actor/ppo_kl": masked_mean(drift, mask)}
    upper, lower = found.clipped & ~found.dual, found.dual
    if name == "geo_mean":
        upper, lower = found.clipped & (advantages > 0), found.clipped & (advantages < 0)
    return {
        "actor/pg_clipfrac": share(upper),
        "actor/ppo_kl": masked_mean(drift, mask),
        "actor/pg_clipfrac_lower": share(lower),
    }


def verl_deprecated(case):
    given, params = case["inputs"], case["params"]
    both = params.get("cliprange")
    low, high = (both if params.get(name) is None else params[name] for name in ("cliprange_low", "cliprange_high"))
    rows = Rows(given["response_mask"])
    logprobs, old, advantages = (rows.column(given[name]) for name in ("log_prob", "old_log_prob", "advantages"))
    found = clipped_surrogate(logprobs, old, advantages, low, high, params.get("clip_ratio_c", 3.0))
    metrics = _verl_metrics("vanilla", rows, logprobs, old, advantages, found)
    weights = verl_weights(rows.batch, params.get("loss_agg_mode", "token-mean"), max(rows.lengths), {})
    return {"pg_loss": (weights * found.terms).sum()} | {name.removeprefix("actor/"): value for name, value in metrics.items()}


def verl_reinforce(case):
    given = case["inputs"]
    rows, logprobs = Rows(given["response_mask"]), leaf(given["log_prob"])
    weights = given["rollout_is_weights"]
    correction = torch.ones(rows.batch.num_tokens) if weights is None else rows.column(weights)
    rollout = rows.column(given["rollout_log_prob"])
    return _reinforced(rows, logprobs, rollout, given["advantages"], correction, rows.batch.loss_mask, case["params"])


def _reinforced(rows, logprobs, rollout, advantages, correction, mask, params):
    batch = rows.batch.with_(loss_mask=mask)
    found = reinforce(rows.column(logprobs), rollout, rows.column(advantages))
    loss = (verl_weights(batch, params["loss_agg_mode"], max(rows.lengths), {}) * found.terms * correction).sum()
    metrics = {"actor/ppo_kl": masked_mean(rollout - rows.column(logprobs).detach(), mask)}
    return {"loss": loss, "metrics": metrics, "grad_log_prob": _split(rows, gradient(loss, logprobs))}


def verl_bypass(case):
    """The engine's log-probs are the old ones; weights and rejections are of the current policy over the engine's."""
    from tests.parity.golden_correction import verl_correction, verl_params

    given, params = case["inputs"], verl_params(case)
    rows, logprobs = Rows(given["response_mask"]), leaf(given["log_prob"])
    rollout = rows.column(given["rollout_log_prob(=old_log_prob)"])
    current = rows.column(logprobs).detach()
    weights, mask, metrics = verl_correction(rows, current, rollout, params)
    if params["loss_type"] == "reinforce":
        correction = torch.ones_like(current) if weights is None else weights
        out = _reinforced(rows, logprobs, rollout, given["advantages"], correction, mask, params)
    else:
        advantages = rows.column(given["advantages"])
        found = clipped_surrogate(
            rows.column(logprobs), rollout, advantages, params["clip_ratio_low"], params["clip_ratio_high"], params["clip_ratio_c"]
        )
        rejected = Rows(rows.rows(mask.int()))
        loss = (verl_weights(rejected.batch, params["loss_agg_mode"], max(rows.lengths), {}) * found.terms).sum()
        out = {
            "loss": loss,
            "metrics": _verl_metrics("vanilla", rejected, current, rollout, advantages, found),
            "grad_log_prob": _split(rows, gradient(loss, logprobs)),
        }
    return out | {"metrics": out["metrics"] | metrics}


def verl_value_loss(case):
    given, params = case["inputs"], case["params"]
    rows, predicted = Rows(given["response_mask"]), leaf(given["vpreds"])
    found = value_loss(
        rows.column(predicted), rows.column(given["values"]), rows.column(given["returns"]), params["cliprange_value"]
    )
    loss = 0.5 * (verl_weights(rows.batch, params["loss_agg_mode"], max(rows.lengths), {}) * found.terms).sum()
    return {
        "vf_loss": loss,
        "vf_clipfrac": masked_mean(found.clipped.float(), rows.batch.loss_mask),
        "grad_vpreds": _split(rows, gradient(loss, predicted)),
    }


ADAPTERS = {
    "slime_policy_loss": by_source({"compute_policy_loss": slime_policy_loss, "compute_cispo_loss": slime_cispo}),
    "slime_gspo_opsm": by_source(
        {
            "ppo_utils.compute_gspo_kl": slime_gspo_kl,
            "compute_gspo_kl -> compute_policy_loss": slime_gspo_loss,
            "compute_opsm_mask": slime_opsm,
        }
    ),
    "verl_policy_loss": by_source(
        {
            "policy loss '": verl_policy_loss,
            "policy loss 'bypass_mode'": verl_bypass,
            "compute_policy_loss (deprecated)": verl_deprecated,
            "compute_policy_loss_reinforce": verl_reinforce,
        }
    ),
    "verl_value_loss": by_source({"compute_value_loss": verl_value_loss}),
}
