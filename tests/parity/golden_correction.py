"""Importance weights and rejection between engine and trainer, with their metrics: slime's and verl's forms."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tests.parity.golden_batches import Rows, by_source
from tests.parity.verl_metrics import batch_mismatch, spread_of
from whet.algo.correction_presets import PRESETS, Preset
from whet.core.batch import TrainBatch
from whet.core.choices import Correction, Rejection
from whet.core.correction import correct, divergence, kept, level_log_ratio, normalizer, sampling_log_ratio, vetoed, within
from whet.core.losses import ratio_of
from whet.core.mismatch import effective_sample_size, mismatch_of
from whet.core.segments import per_sample_max, per_sample_mean
from whet.core.whiten import masked_mean

VERL_STATISTICS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


# slime


def tis(bound: str):
    """Weights on every entry of the loss, masked or not; slime logs the raw ratio, where it was bounded, |ratio - 1|."""

    def adapter(case):
        given, params = case["inputs"], case["params"]
        rows = Rows(given["loss_masks"])
        log_ratio = sampling_log_ratio(rows.column(given["train_log_probs"]), rows.column(given["rollout_log_probs"]))
        found = correct(rows.batch, log_ratio, Correction("token", bound, params["tis_clip"], params["tis_clip_low"]))
        raw = ratio_of(log_ratio)
        return {
            "pg_loss": rows.flat(rows.column(given["pg_loss"]) * found.weights),
            "loss_masks": given["loss_masks"],
            "metrics": {
                "tis": rows.flat(raw),
                "tis_clipfrac": rows.flat(found.weights != raw).float(),
                "tis_abs": rows.flat((raw - 1).abs()),
            },
        }

    return adapter


def mis(case):
    """Weights zeroed on masked entries, a mask that only rejection changes, columns for every metric."""
    given, params = case["inputs"], case["params"]
    rows = Rows(given["loss_masks"])
    batch = rows.batch
    train, rollout = rows.column(given["train_log_probs"]), rows.column(given["rollout_log_probs"])
    metrics = _mismatch_columns(rows, train, rollout)
    if not params["use_tis"]:
        return {"weights": None, "modified_masks": rows.rows(batch.loss_mask.float()), "metrics": metrics}
    log_ratio = sampling_log_ratio(train, rollout)
    low, high = params["tis_lower_bound"], params["tis_upper_bound"]
    correction = Correction(params["tis_level"], params["tis_mode"], high, low)
    found = correct(batch, log_ratio, correction)
    weights, keep = found.weights * batch.loss_mask, found.keep & batch.loss_mask
    metrics["tis_weight_before_bound"] = rows.rows(found.raw)
    if params["tis_mode"] == "truncate":
        metrics["tis_truncate_fraction"] = rows.rows((found.raw > high).int())
    else:
        metrics |= _fractions(rows, f"tis_{params['tis_mode']}", found.raw, correction.bottom, high)
    metrics["tis_weight_after_bound"] = rows.rows(weights)
    if params["use_rs"]:
        keep = keep & _rejected(rows, log_ratio, params, correction.bottom, metrics)
    metrics["is_ratio_mean_after_tis_rs"] = rows.rows(weights)
    if params["tis_batch_normalize"]:
        if params["tis_level"] == "geometric":
            raise ValueError("weights of the geometric level are not normalised")
        factor = normalizer(batch, weights, params["tis_level"], empty_counts=True)
        weights = weights / factor
        metrics["batch_norm_factor"] = rows.rows(torch.full_like(weights, factor))
    metrics["is_ratio_mean_final"] = rows.per_row(per_sample_mean(batch, weights))
    metrics["is_ratio_min_final"] = rows.per_row(-per_sample_max(batch, -weights))
    metrics["is_ratio_max_final"] = rows.per_row(per_sample_max(batch, weights))
    return {"weights": rows.rows(weights), "modified_masks": rows.rows(keep.float()), "metrics": metrics}


def _rejected(rows: Rows, log_ratio: Tensor, params: dict[str, Any], bottom: float, metrics: dict[str, Any]) -> Tensor:
    batch = rows.batch
    low = bottom if params["rs_lower_bound"] is None else params["rs_lower_bound"]
    high = params["tis_upper_bound"] if params["rs_upper_bound"] is None else params["rs_upper_bound"]
    ratio = level_log_ratio(batch, log_ratio, params["rs_level"]).clamp(-20, 20).exp()
    metrics |= _fractions(rows, "rs_mask", ratio, low, high)
    keep = within(batch, log_ratio, params["rs_level"], low, high)
    if params["rs_veto_threshold"] is not None:
        bad = vetoed(batch, log_ratio, params["rs_veto_threshold"])
        below = batch.loss_mask & (log_ratio.exp() < params["rs_veto_threshold"])
        metrics["rs_catastrophic_token_fraction"] = rows.rows(below.int())
        metrics["rs_catastrophic_seq_fraction"] = rows.rows(bad.int())
        keep = keep & ~bad
    return keep


def _fractions(rows: Rows, name: str, ratio: Tensor, low: float, high: float) -> dict[str, Any]:
    return {f"{name}_fraction_low": rows.rows((ratio < low).int()), f"{name}_fraction_high": rows.rows((ratio > high).int())}


def _mismatch_columns(rows: Rows, train: Tensor, rollout: Tensor) -> dict[str, Any]:
    """slime's per-token columns; its chi-squares are each sample's own."""
    batch = rows.batch
    found = mismatch_of(batch, train, rollout)
    difference = found.train_log_ppl - found.rollout_log_ppl
    per_sample = {
        "training_log_ppl": found.train_log_ppl,
        "training_ppl": found.train_log_ppl.exp(),
        "rollout_log_ppl": found.rollout_log_ppl,
        "rollout_ppl": found.rollout_log_ppl.exp(),
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
        "chi2_token": per_sample_mean(batch, found.squared_ratio) - 1,
        "chi2_seq": found.squared_product - 1,
    }
    return {name: rows.per_row(column) for name, column in per_sample.items()} | {
        "kl": rows.rows(found.kl),
        "k3_kl": rows.rows(found.k3_kl),
    }


# verl

VERL_DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}
VERL_NAMES = {whet: verl for verl, whet in VERL_STATISTICS.items()}


def preset_of(case) -> str | None:
    """The preset that a case names: in its parameters or inputs, its source or its name."""
    values = [value for part in (case["params"], case["inputs"]) for value in part.values() if isinstance(value, str)]
    words = re.findall(r"\w+", " ".join((case["source"], case["name"])))
    return next((word for word in values + words if word in PRESETS), None)


def verl_fields(preset: Preset, params: dict[str, Any]) -> dict[str, Any]:
    """A preset of whet's as the fields of verl's record, with the thresholds that its maker was given."""
    given = preset.settings
    high = params.get("is_threshold", params.get("threshold", given.get("high", 2.0)))
    if given.get("bound") == "icepop":
        high = f"{params.get('threshold_lower', given['low'])}_{high}"
    fields = VERL_DEFAULTS | {"rollout_is": given.get("weights"), "rollout_is_threshold": high}
    for criterion in given.get("reject", ()):
        pool, kind = criterion["statistic"].split("_")
        bounds = criterion["high"] if "low" not in criterion else f"{criterion['low']}_{criterion['high']}"
        fields |= {"rollout_rs": f"{VERL_NAMES[pool]}_{kind}", "rollout_rs_threshold": params.get("rs_threshold", bounds)}
    bypass = {"bypass_mode": preset.mode != "decoupled", "loss_type": "reinforce" if preset.mode == "reinforce" else "ppo_clip"}
    return fields | bypass


def verl_params(case) -> dict[str, Any]:
    """The parameters of a case, of the preset that it names first; what it does not say is verl's default."""
    name = preset_of(case)
    fields = VERL_DEFAULTS if name is None else verl_fields(PRESETS[name], case["params"])
    return {**fields, **case["params"]}


def presets(case):
    """verl's makers of configurations: what one gives for recorded log-probs, its fields, or the fields of all."""
    if "response_mask" in case["inputs"]:
        return combined(case)
    name = preset_of(case)
    if name is None:
        return {name: verl_fields(preset, {}) for name, preset in PRESETS.items() if "icepop" not in name}
    return verl_fields(PRESETS[name], case["params"])


def is_weights(case):
    rows = Rows(case["inputs"]["response_mask"])
    weights, metrics = _verl_weights(rows, rows.column(case["inputs"]["log_ratio"]), verl_params(case))
    return {"weights": rows.rows(weights), "metrics": metrics}


def rs_mask(case):
    rows = Rows(case["inputs"]["response_mask"])
    keep, metrics = _verl_rejection(rows, rows.column(case["inputs"]["log_ratio"]), verl_params(case))
    return {"modified_response_mask": rows.rows((keep & rows.batch.loss_mask).int()), "metrics": metrics}


def combined(case):
    given = case["inputs"]
    rows = Rows(given["response_mask"])
    train, rollout = rows.column(given["old_log_prob"]), rows.column(given["rollout_log_prob"])
    weights, mask, metrics = verl_correction(rows, train, rollout, verl_params(case))
    return {
        "weights": None if weights is None else rows.rows(weights),
        "modified_response_mask": rows.rows(mask.int()),
        "metrics": metrics,
    }


def verl_correction(
    rows: Rows, train: Tensor, rollout: Tensor, params: dict[str, Any]
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Weights (None where none are asked for), the mask after rejection, and every metric."""
    log_ratio = sampling_log_ratio(train, rollout)
    weights, mask, metrics = None, rows.batch.loss_mask, {}
    if params["rollout_is"] is not None:
        weights, found = _verl_weights(rows, log_ratio, params)
        metrics |= found
    if params["rollout_rs"] is not None:
        keep, found = _verl_rejection(rows, log_ratio, params)
        mask = mask & keep
        metrics |= found
    metrics |= batch_mismatch(rows.batch, mismatch_of(rows.batch, train, rollout))
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _verl_weights(rows: Rows, log_ratio: Tensor, params: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """verl measures the weights before the bound; std and effective sample size of weights within [1 / high, high]."""
    batch, level, high = rows.batch, params["rollout_is"], float(params["rollout_is_threshold"])
    found = correct(batch, log_ratio, Correction(level, "truncate", high))
    raw, weights = found.raw * batch.loss_mask, found.weights * batch.loss_mask
    spread = spread_of(batch, raw, 1 / high, high, ideal=1.0, all_samples=True)
    metrics = {
        "rollout_is_mean": spread.mean,
        "rollout_is_max": spread.highest,
        "rollout_is_min": spread.lowest,
        "rollout_is_ratio_fraction_high": spread.share_above,
        "rollout_is_ratio_fraction_low": spread.share_below,
        "rollout_is_std": spread.std,
        "rollout_is_eff_sample_size": effective_sample_size(raw.clamp(1 / high, high), batch.loss_mask),
        "rollout_is_seq_mean": spread.sample_mean,
        "rollout_is_seq_std": spread.sample_std,
        "rollout_is_seq_max": spread.sample_highest,
        "rollout_is_seq_min": spread.sample_lowest,
        "rollout_is_seq_max_deviation": spread.sample_deviation,
        "rollout_is_seq_fraction_high": spread.sample_share_above,
        "rollout_is_seq_fraction_low": spread.sample_share_below,
    }
    if level == "sequence":
        product = level_log_ratio(batch, log_ratio, level)[batch.starts]
        metrics |= {
            "rollout_is_max": float(product.max().clamp(max=20).exp()),
            "rollout_is_min": float(product.min().exp()),
            "rollout_is_ratio_fraction_high": _share(product.exp() > high),
            "rollout_is_ratio_fraction_low": _share(product.exp() < 1 / high),
        }
    if params["rollout_is_batch_normalize"]:
        factor = normalizer(batch, weights, level)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def _verl_rejection(rows: Rows, log_ratio: Tensor, params: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    batch = rows.batch
    metrics: dict[str, float] = {}
    rejections = {name: _rejection(name, threshold) for name, threshold in _thresholds(params)}
    for name, rejection in rejections.items():
        metrics |= {f"rollout_rs_{name}_{key}": value for key, value in _rejection_metrics(batch, log_ratio, rejection).items()}
    keep = kept(batch, log_ratio, list(rejections.values()))
    metrics["rollout_rs_masked_fraction"] = float(masked_mean((~keep).float(), batch.loss_mask))
    metrics["rollout_rs_seq_masked_fraction"] = _share(per_sample_max(batch, (~keep).float()) > 0)
    return keep, metrics


def _thresholds(params: dict[str, Any]) -> list[tuple[str, str]]:
    """Criteria are a comma list, each once; thresholds are one for all, or one for each."""
    names = list(dict.fromkeys(name.strip() for name in params["rollout_rs"].split(",")))
    if params["rollout_rs_threshold"] is None:
        raise ValueError("rejection needs a threshold")
    given = [part.strip() for part in str(params["rollout_rs_threshold"]).split(",")]
    if len(given) not in (1, len(names)):
        raise ValueError(f"{len(names)} criteria, but {len(given)} thresholds")
    return list(zip(names, given * len(names) if len(given) == 1 else given, strict=True))


def _rejection(name: str, threshold: str) -> Rejection:
    pool, kind = name.rsplit("_", 1)
    if pool not in VERL_STATISTICS:
        raise ValueError(f"there is no criterion {name!r}")
    low, _, high = threshold.rpartition("_")
    return Rejection(f"{VERL_STATISTICS[pool]}_{kind}", float(high), float(low) if low else None)


def _rejection_metrics(batch: TrainBatch, log_ratio: Tensor, rejection: Rejection) -> dict[str, float]:
    values = divergence(batch, log_ratio, rejection.statistic)
    low, high = rejection.bounds
    of_samples = not rejection.statistic.startswith("token")
    spread = spread_of(batch, values, low, high, per_sample=values[batch.starts] if of_samples else None)
    keep = kept(batch, log_ratio, [rejection])
    has = per_sample_max(batch, batch.loss_mask.float()) > 0
    metrics = {
        "mean": spread.mean,
        "max": spread.highest,
        "min": spread.lowest,
        "fraction_high": spread.sample_share_above if of_samples else spread.share_above,
        "fraction_low": spread.sample_share_below if of_samples else spread.share_below,
        "std": spread.std,
        "seq_mean": spread.sample_mean,
        "seq_std": spread.sample_std,
        "seq_max": spread.sample_highest,
        "seq_min": spread.sample_lowest,
        "seq_max_deviation": spread.sample_deviation,
        "seq_fraction_high": spread.sample_share_above,
        "masked_fraction": float(masked_mean((~keep).float(), batch.loss_mask)),
        "seq_masked_fraction": _share((per_sample_max(batch, (~keep).float()) > 0)[has]),
    }
    if rejection.of_ratio:
        return metrics | {"seq_fraction_low": spread.sample_share_below}
    return metrics | {"fraction_low": 0.0}


def _share(which: Tensor) -> float:
    return float(which.float().mean())


ADAPTERS = {
    "slime_offpolicy": by_source(
        {"vanilla_tis_function": tis("clip"), "icepop_function": tis("icepop"), "compute_mis_weights": mis}
    ),
    "verl_rollout_correction": by_source(
        {
            "compute_rollout_correction_weights": is_weights,
            "compute_rollout_rejection_mask": rs_mask,
            "compute_rollout_correction_and_rejection_mask": combined,
            "RolloutCorrectionConfig": presets,
        }
    ),
}
