"""Reducers: slime's sums of sample means, verl's agg_loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.parity.golden_batches import Rows, by_source, gradient, leaf
from whet.core.batch import TrainBatch
from whet.core.weights import constant, sample_mean, sequence_mean, sequence_sum, token_mean


def sum_of_sample_mean(case):
    """slime divides by the number of rollouts, or of tokens, outside of this function: a total of 1 here.

    `sample_denoms` are the trained tokens of each sample's whole rollout: samples that share it are one trajectory.
    """
    given = case["inputs"]
    x = leaf(given["x"])
    rows, weights = rollout_mean(given["loss_masks"], given["sample_denoms"])
    if case["params"]["calculate_per_token_loss"]:
        weights = token_mean(rows.batch, total=1.0)
    value = (weights * rows.column(x)).sum()
    return {"value": value, "grad_x": gradient(value, x)}


def rollout_mean(masks: list[list[int]], denominators: list[float] | None) -> tuple[Rows, Tensor]:
    """Rows and the weights of slime's mean per rollout. Neighbours that make up a denominator together are one trajectory;
    where siblings are in another micro-batch, the denominator is as it was given."""
    owners: list[int] = []
    missing, complete = 0.0, True
    for i, mask in enumerate(masks):
        wanted = sum(mask) if denominators is None else denominators[i]
        joins = missing > 0 and denominators is not None and wanted == denominators[i - 1]
        complete = complete and (missing <= 0 or joins)
        owners.append(owners[-1] if joins else i)
        missing = (missing if joins else wanted) - sum(mask)
    rows = Rows(masks, owners=owners)
    if complete and missing <= 0:
        return rows, sample_mean(rows.batch, total=1.0)
    rows = Rows(masks)
    per_sample = torch.tensor(denominators, dtype=torch.float32).clamp(min=1)
    return rows, token_mean(rows.batch, total=1.0) / per_sample[rows.batch.sample_of_token]


def agg_loss(case):
    given, params = case["inputs"], case["params"]
    rows, terms = Rows(given["loss_mask"]), leaf(given["loss_mat"])
    info = {name: value for name, value in params.items() if name != "loss_agg_mode"}
    value = (verl_weights(rows.batch, params["loss_agg_mode"], max(rows.lengths), info) * rows.column(terms)).sum()
    return {"loss": value, "grad": [piece.tolist() for piece in gradient(value, terms).split(rows.lengths)]}


def verl_weights(batch: TrainBatch, mode: str, width: int, info: Mapping[str, Any]) -> Tensor:
    """verl's aggregation modes: totals of the whole step, over the ranks whose gradients are averaged."""
    ranks = info.get("dp_size", 1)
    tokens, sequences = (info.get(name) for name in ("batch_num_tokens", "global_batch_size"))
    tokens = None if tokens is None else tokens / ranks
    sequences = None if sequences is None else sequences / ranks
    if ranks > 1 and mode != "seq-mean-token-sum-norm" and (tokens if mode == "token-mean" else sequences) is None:
        raise ValueError(f"{mode} over {ranks} ranks needs the step's total")
    if mode == "token-mean":
        return token_mean(batch, tokens)
    if mode == "seq-mean-token-mean":
        return sequence_mean(batch, sequences)
    if mode == "seq-mean-token-sum":
        return sequence_sum(batch, sequences)
    if mode == "seq-mean-token-sum-norm":
        scale = info.get("loss_scale_factor")
        return constant(batch, width if scale is None else scale)
    raise ValueError(f"there is no reducer {mode!r}")


ADAPTERS = {
    "slime_reducers": by_source({"get_sum_of_sample_mean": sum_of_sample_mean}),
    "verl_agg_loss": by_source({"agg_loss": agg_loss}),
}
