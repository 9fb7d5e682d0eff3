"""Off-policy correction as an algorithm applies it: weights, rejections and metrics of a whole rollout or step."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.algo.correction_config import CorrectionConfig
from whet.core.batch import TrainBatch
from whet.core.choices import Correction, Rejection
from whet.core.correction import ImportanceWeights, correct, kept, normalizer, sampling_log_ratio, vetoed
from whet.core.mismatch import effective_sample_size, mismatch_of
from whet.core.segments import per_sample_count
from whet.observe.metrics import Mean, Metrics
from whet.types import Origin


def rollout_logprobs(batch: TrainBatch, train_logprobs: Tensor) -> Tensor:
    """Log-prob that each token was sampled with. For tokens of the environment it is the trainer's, so
    that their ratio is 1. [T]"""
    return torch.where(batch.origin == int(Origin.MODEL), batch.rollout_logprobs, train_logprobs.detach())


def kept_tokens(batch: TrainBatch, train_logprobs: Tensor, config: CorrectionConfig) -> Tensor:
    """True for the tokens that nothing rejects. [T] bool"""
    log_ratio = sampling_log_ratio(train_logprobs, rollout_logprobs(batch, train_logprobs))
    keep = kept(batch, log_ratio, [Rejection(c.statistic, c.high, c.low) for c in config.reject])
    if config.veto is not None:
        keep = keep & ~vetoed(batch, log_ratio, config.veto)
    weights = _weights(batch, log_ratio, config)
    return keep if weights is None else keep & weights.keep


def corrected(batch: TrainBatch, train_logprobs: Tensor, config: CorrectionConfig) -> TrainBatch:
    """The rollout with `correction` and `kept`, both from the statistics of all of its trained tokens.

    With `rejected="mask"` the tokens that are not kept stop training afterwards, so nothing is to be found again from those that are left.
    """
    log_ratio = sampling_log_ratio(train_logprobs, rollout_logprobs(batch, train_logprobs))
    found = _weights(batch, log_ratio, config)
    keep = kept_tokens(batch, train_logprobs, config)
    mask = batch.loss_mask & keep if config.rejected == "mask" else batch.loss_mask
    return batch.with_(correction=torch.ones_like(log_ratio) if found is None else found.weights, kept=keep, loss_mask=mask)


def corrected_step(batch: TrainBatch, config: CorrectionConfig) -> TrainBatch:
    """One optimizer step with `correction` as the loss takes it; a rejected token has no weight in any term of the loss."""
    assert batch.correction is not None and batch.kept is not None and batch.weights is not None, "found with the credit; then reduced"
    correction = batch.correction
    if config.normalize:
        assert config.weights is not None
        correction = correction / normalizer(batch, correction, config.weights)
    return batch.with_(correction=correction * batch.kept, weights=batch.weights * batch.kept)


def correction_metrics(batch: TrainBatch, train_logprobs: Tensor, config: CorrectionConfig) -> Metrics:
    """Distance of the two policies, and what the correction makes of it. Over trained tokens, and samples that have any."""
    mask = batch.loss_mask
    count, used = mask.sum(), per_sample_count(batch) > 0
    if not bool(mask.any()):
        return {}
    rollout = rollout_logprobs(batch, train_logprobs)
    found = mismatch_of(batch, train_logprobs, rollout)
    samples = used.sum()
    metrics: Metrics = {
        "correction/kl": Mean(found.kl[mask].sum(), count),
        "correction/k3_kl": Mean(found.k3_kl[mask].sum(), count),
        "correction/chi2_token": Mean((found.squared_ratio[mask] - 1).sum(), count),
        "correction/chi2_sequence": Mean((found.squared_product[used] - 1).sum(), samples),
        "correction/train_log_ppl": Mean(found.train_log_ppl[used].sum(), samples),
        "correction/rollout_log_ppl": Mean(found.rollout_log_ppl[used].sum(), samples),
        "correction/rejected": Mean((~kept_tokens(batch, train_logprobs, config) & mask).sum(), count),
    }
    weights = _weights(batch, sampling_log_ratio(train_logprobs, rollout), config)
    if weights is not None:
        metrics["correction/weight"] = Mean(weights.weights[mask].sum(), count)
        metrics["correction/bounded"] = Mean((weights.weights != weights.raw)[mask].sum(), count)
        share = effective_sample_size(weights.weights, mask)
        if share is not None:
            metrics["correction/effective_sample_size"] = Mean(share, 1)
    return metrics


def _weights(batch: TrainBatch, log_ratio: Tensor, config: CorrectionConfig) -> ImportanceWeights | None:
    if config.weights is None:
        return None
    return correct(batch, log_ratio, Correction(config.weights, config.bound, config.high, config.low))
