"""Whole losses of slime from logits to gradients: policy, supervised and value loss, with everything it logs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parity.golden_batches import Rows, by_source, flatten, gradient
from tests.parity.golden_kl import SLIME_KL
from tests.parity.golden_reducers import rollout_mean
from whet.algo.base import StepPlan
from whet.algo.config import CISPOConfig, GRPOConfig, GSPOConfig
from whet.algo.correction_config import CorrectionConfig
from whet.algo.grpo import Relative, grpo
from whet.algo.offpolicy import corrected
from whet.algo.policy import PolicyGradient
from whet.algo.policy_config import LossConfig
from whet.algo.sft import sft_loss
from whet.core.batch import TokenOutputs
from whet.core.choices import Correction
from whet.core.correction import correct, sampling_log_ratio
from whet.core.logprobs import chunked_logprobs
from whet.core.losses import sequence_log_ratio, value_loss
from whet.core.segments import per_sample_count
from whet.core.weights import token_mean

ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


def loss_function(case):
    given, params = case["inputs"], case["params"]
    rows, weights, tokens = _reduction(given, params)
    logits = torch.tensor(given["logits"], requires_grad=True)
    out = _outputs(rows, logits, given, params)
    batch = rows.batch.with_(weights=weights)
    if params["loss_type"] == "sft_loss":
        loss = (weights * sft_loss(batch, out).terms).sum()
        log = {"loss": loss}
    elif params["loss_type"] == "policy_loss":
        names = ("advantages", "rollout_log_probs") + (("ref_log_probs",) if params["use_kl_loss"] else ())
        columns = dict(zip(("advantages", "rollout_logprobs", "ref_logprobs"), (rows.column(given[n]) for n in names), strict=False))
        algorithm = _algorithm(params, bool(given["log_probs"]))
        if algorithm.old_logprobs == "rollout":
            columns["old_logprobs"] = columns["rollout_logprobs"]
        elif algorithm.old_logprobs == "recompute":
            # Where slime has no old log-probs it takes the present ones; a correction of whet's is found before the step.
            columns["old_logprobs"] = rows.column(given["log_probs"]) if given["log_probs"] else out.logprobs.detach()
        batch = batch.with_(**columns)
        if algorithm.config.correction.used:
            batch = corrected(batch, columns["old_logprobs"], algorithm.config.correction)
        loss, log = _policy(algorithm, rows, batch, out, params)
    else:
        raise ValueError(f"there is no loss {params['loss_type']!r}")
    return _scaled(loss, log, params, tokens) | {"grad_logits": gradient(loss * _scale(params), logits)}


def value_step(case):
    given, params = case["inputs"], case["params"]
    rows, weights, _ = _reduction(given, params)
    logits = torch.tensor(given["logits"], requires_grad=True)
    predicted = rows.column(logits[0, _predictors(given), 0])
    found = value_loss(predicted, rows.column(given["values"]), rows.column(given["returns"]), params["value_clip"])
    loss = (weights * found.terms).sum()
    return {
        "scaled_loss": loss * _scale(params),
        "log": {"value_loss": loss, "value_clipfrac": (weights * found.moved).sum()},
        "grad_logits": gradient(loss * _scale(params), logits),
    }


def _algorithm(params: dict[str, Any], has_old: bool) -> PolicyGradient:
    """slime's flags as whet's settings."""
    if params["custom_pg_loss_reducer_function_path"] is not None or params["rollout_top_p"] != 1.0:
        raise ValueError("this adapter has neither slime's own reducers nor top-p data")
    old = "rollout" if params["use_rollout_logprobs"] else "recompute" if has_old or params["use_tis"] else "current"
    correction = CorrectionConfig()
    if params["use_tis"]:
        bound = {None: "clip", ICEPOP: "icepop"}[params["custom_tis_function_path"]]
        correction = CorrectionConfig(weights="token", bound=bound, high=params["tis_clip"], low=params["tis_clip_low"])
    settings = {
        "clip_low": params["eps_clip"],
        "clip_high": params["eps_clip_high"],
        "clip_dual": params["eps_clip_c"],
        "entropy_coef": params["entropy_coef"],
        "kl_coef": params["kl_loss_coef"] if params["use_kl_loss"] else 0.0,
        "old_logprobs": old,
        "mask_delta": params["opsm_delta"] if params["use_opsm"] else None,
        "correction": correction,
    }
    if params["use_kl_loss"]:
        settings |= {"reference": True, "kl_estimator": SLIME_KL[params["kl_loss_type"]], "kl_unbiased": params["use_unbiased_kl"]}
    name = params["advantage_estimator"]
    if name == "gspo":
        config: Relative = GSPOConfig(**settings, loss=LossConfig(name="sequence", sequence_gradient="sequence"))
    else:
        config = CISPOConfig(**settings) if name == "cispo" else GRPOConfig(**settings)
    return grpo(config, StepPlan(1), name)


def _policy(algorithm: PolicyGradient, rows: Rows, batch, out: TokenOutputs, params) -> tuple[Tensor, dict[str, Tensor]]:
    parts = algorithm.parts(algorithm.prepare(batch), out)
    weights = batch.weights

    def reduced(column: Tensor) -> Tensor:
        return (weights * column).sum()

    logprobs = out.logprobs.detach()
    drift = parts.old - logprobs
    if params["advantage_estimator"] == "gspo":
        drift = -sequence_log_ratio(batch, logprobs, parts.old, "sequence")
    loss = reduced(parts.terms)
    compared = logprobs if params["use_rollout_logprobs"] else parts.old
    log = {
        "loss": loss,
        "pg_loss": reduced(parts.policy),
        "entropy_loss": reduced(out.entropy),
        "pg_clipfrac": reduced(parts.clip.clipped & ~parts.clip.dual),
        "ppo_kl": reduced(drift),
        "train_rollout_logprob_abs_diff": reduced((compared - batch.rollout_logprobs).abs()),
    }
    if params["use_kl_loss"]:
        log["kl_loss"] = reduced(parts.kl)
    if params["use_tis"]:
        config = algorithm.config.correction
        found = correct(
            batch, sampling_log_ratio(parts.old, batch.rollout_logprobs), Correction("token", config.bound, config.high, config.low)
        )
        log |= {
            "ois": reduced((-drift).exp()),
            "tis": reduced(found.raw),
            "tis_clipfrac": reduced(found.weights != found.raw),
            "tis_abs": reduced((found.raw - 1).abs()),
        }
    if params["use_opsm"]:
        dropped = per_sample_count(batch, ~parts.masked & rows.responses) / per_sample_count(batch).clamp(min=1)
        log["opsm_clipfrac"] = dropped.sum()
    return loss, log


def _reduction(given: dict[str, Any], params: dict[str, Any]) -> tuple[Rows, Tensor, int]:
    """Rows, weights without the step's total, and slime's count of tokens (at least one for each sample)."""
    rows, weights = rollout_mean(given["loss_masks"], given["rollout_mask_sums"])
    if params["calculate_per_token_loss"]:
        weights = token_mean(rows.batch, total=1.0)
    return rows, weights, int(per_sample_count(rows.batch).clamp(min=1).sum())


def _predictors(given: dict[str, Any]) -> list[int]:
    """Rows of the packed logits that predict response tokens."""
    places, end = [], 0
    for total, response in zip(given["total_lengths"], given["response_lengths"], strict=True):
        end += total
        places += range(end - response - 1, end - 1)
    return places


def _outputs(rows: Rows, logits: Tensor, given: dict[str, Any], params: dict[str, Any]) -> TokenOutputs:
    targets = [t[-r:] for t, r in zip(given["unconcat_tokens"], given["response_lengths"], strict=True)]
    picked = logits[0, _predictors(given)]
    heat = torch.full((len(picked),), params["rollout_temperature"])
    size = params["log_probs_chunk_size"]
    logprobs, entropy = chunked_logprobs(
        lambda hidden: hidden, picked, torch.tensor(flatten(targets)), heat, len(picked) if size <= 0 else size, entropy_grad=True
    )
    return TokenOutputs(rows.column(logprobs), rows.column(entropy))


def _scale(params: dict[str, Any]) -> float:
    return 1.0 if params["calculate_per_token_loss"] else params["num_microbatches"] / params["step_global_batch_size"]


def _scaled(loss: Tensor, log: dict[str, Tensor], params: dict[str, Any], tokens: int) -> dict[str, Any]:
    per_token = params["calculate_per_token_loss"]
    return {
        "scaled_loss": loss * _scale(params),
        "normalizer": tokens if per_token else 1,
        "log": log,
        "log_denominator_slot": tokens if per_token else 0,
    }


ADAPTERS = {
    "slime_loss_e2e": by_source({"loss.loss_function": loss_function, "loss.loss_function (value_loss)": value_step}),
}
