"""Off-policy correction as an algorithm applies it: weights, rejections and metrics of a whole rollout or step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor

from whet.algo.correction_presets import PRESETS, Preset, PresetName
from whet.config import Config, refuse_unread
from whet.core.batch import TrainBatch
from whet.core.choices import Bound, Correction, Level, Rejection, Statistic
from whet.core.correction import Weights, correct, kept, normalizer, sampling_log_ratio, vetoed
from whet.core.mismatch import effective_sample_size, mismatch_of
from whet.core.segments import per_sample_count
from whet.observe.metrics import Mean, Metrics
from whet.types import Origin


class RejectionConfig(Config):
    """Tokens are kept where a statistic of log pi_rollout / pi_train is within bounds."""

    statistic: Statistic
    """token_, sum_, mean_ or max_ (over a sample), of k1, k2 or k3."""
    high: float = Field(gt=0)
    """Largest value; for k1 the largest ratio pi_rollout / pi_train."""
    low: float | None = Field(default=None, gt=0)
    """For k1 the smallest ratio; unset: 1 / high."""


class CorrectionConfig(Config):
    """Importance weights of the trainer's policy over the engine's, and what is rejected."""

    preset: PresetName | None = None
    """One of verl's named presets, whose settings hold where none are given here."""
    weights: Level | None = None
    """Whose ratio weighs a token: its own (token), the product over its sample (sequence), or that one's root (geometric);
    unset: no weights."""
    bound: Bound = "truncate"
    """What happens outside of [low, high]. truncate: at most high; clip: into the bounds; icepop: weight 0; mask: rejected."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound of a weight."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound; unset: 1 / high."""
    normalize: bool = False
    """Divide weights by their mean over the step's trained tokens (which with rejected=mask are the kept ones)."""
    reject: list[RejectionConfig] = Field(default_factory=list[RejectionConfig])
    """A token trains if all of these keep it."""
    veto: float | None = Field(default=None, gt=0)
    """Reject every token of a sample in which some token's ratio pi_train / pi_rollout is below this."""
    rejected: Literal["weigh", "mask"] = "weigh"
    """weigh: a rejected token has weight 0 and still counts in denominators (slime); mask: it is masked before credit is
    assigned, as if it had not been sampled (verl)."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # pydantic says what is wrong with it
        given = cast("Mapping[str, Any]", data)
        preset = next((preset for name, preset in PRESETS.items() if name == given.get("preset")), None)
        return given if preset is None else {**preset.settings, **given}

    @model_validator(mode="after")
    def _consistent(self) -> CorrectionConfig:
        if self.weights is not None:
            Correction(self.weights, self.bound, self.high, self.low)
        for criterion in self.reject:
            Rejection(criterion.statistic, criterion.high, criterion.low)
        if self.normalize and self.weights in (None, "geometric"):
            raise ValueError("normalize divides weights of the token or the sequence level by their mean; set weights to one of these")
        if self.weights is None:
            refuse_unread(self, ["bound", "high", "low"], "without weights, which it bounds", "set weights")
        elif self.bound == "truncate":
            refuse_unread(self, ["low"], "with bound=truncate, which has no lower bound", "set bound to clip, icepop or mask")
        if not self.rejects:
            refuse_unread(self, ["rejected"], "where nothing is rejected", "set reject, veto or bound=mask")
        return self

    @property
    def named(self) -> Preset:
        """The preset; one of no settings where none is named."""
        return PRESETS["disabled" if self.preset is None else self.preset]

    @property
    def rejects(self) -> bool:
        return bool(self.reject) or self.veto is not None or (self.weights is not None and self.bound == "mask")

    @property
    def used(self) -> bool:
        return self.weights is not None or self.rejects


def rollout_logprobs(batch: TrainBatch, train_logprobs: Tensor) -> Tensor:
    """What each token was sampled with. Where the environment wrote it nobody sampled, and its ratio is 1. [T]"""
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


def _weights(batch: TrainBatch, log_ratio: Tensor, config: CorrectionConfig) -> Weights | None:
    if config.weights is None:
        return None
    return correct(batch, log_ratio, Correction(config.weights, config.bound, config.high, config.low))
