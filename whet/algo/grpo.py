"""GRPO: the advantage of a trajectory is its reward relative to its siblings'. arXiv 2402.03300.

With clip-higher and token-mean: DAPO's loss (arXiv 2503.14476).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from whet.algo.base import LossTerms, Need, StepPlan
from whet.config import Config
from whet.core.advantages import group_advantages, group_sizes
from whet.core.batch import TokenOutputs, TrainBatch, one_per_trajectory
from whet.core.kl import KL_ESTIMATORS, KLName
from whet.core.losses import clipped_surrogate
from whet.core.weights import REDUCERS, Reducer, ReducerName
from whet.observe.metrics import Max, Mean, Metrics, Total


class GRPOConfig(Config):
    """GRPO's settings."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped from above at 1 + clip_high (0.28 is DAPO's clip-higher)."""
    clip_dual: float | None = Field(default=None, gt=1)
    """Dual clip: the term of a token with negative advantage is at most clip_dual * |advantage|."""
    normalize_std: bool = True
    """Divide the advantage by the group's standard deviation; false is Dr.GRPO's choice."""
    reducer: ReducerName = "sample_mean"
    """sample_mean: every trajectory counts the same; token_mean: every token does."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference) in the loss."""
    kl_estimator: KLName = "k3"
    """How KL is estimated from the sampled tokens."""
    reference: bool | None = None
    """Keep a frozen copy of the first policy. Unset: only if kl_coef is above 0; true observes the KL at 0 too."""
    old_logprobs: Literal["auto", "recompute", "rollout", "current"] = "auto"
    """Denominator of the ratio. recompute: the trainer's, before the first step; rollout: the engine's; current: the
    present ones, detached (right only if a rollout feeds one step); auto: current if it feeds one, else recompute."""

    @model_validator(mode="after")
    def _consistent(self) -> GRPOConfig:
        if self.kl_coef > 0 and self.reference is False:
            raise ValueError(f"kl_coef is {self.kl_coef} but reference is false: there is nothing to measure the KL to")
        return self

    @property
    def keeps_reference(self) -> bool:
        return self.kl_coef > 0 if self.reference is None else self.reference


class GRPO:
    """Group-relative policy optimisation.

    Args:
        config: its settings.
        plan: how many optimizer steps a rollout feeds.
    """

    def __init__(self, config: GRPOConfig, plan: StepPlan) -> None:
        self.config = config
        self.reducer: Reducer = REDUCERS[config.reducer]
        self.entropy_grad = config.entropy_coef > 0
        if plan.samples_per_prompt is not None and plan.samples_per_prompt < 2:
            raise ValueError(
                "grpo compares the samples of a prompt with each other: batch.samples_per_prompt must be at least 2, "
                f"not {plan.samples_per_prompt}"
            )
        self.old_logprobs = config.old_logprobs
        if self.old_logprobs == "auto":
            self.old_logprobs = "current" if plan.num_steps == 1 else "recompute"
        if self.old_logprobs == "current" and plan.num_steps > 1:
            raise ValueError(
                "algo.grpo.old_logprobs=current is right only if a rollout feeds one optimizer step, but here it feeds "
                f"{plan.num_steps}; use recompute or rollout"
            )
        needs = {Need.OLD_LOGPROBS} if self.old_logprobs == "recompute" else set[Need]()
        if config.keeps_reference:
            needs.add(Need.REF_LOGPROBS)
        self.needs = frozenset(needs)

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """One advantage per sample, on every trained token; groups with fewer than two valid members stop training."""
        per_sample = group_advantages(batch, normalize_std=self.config.normalize_std)
        sizes = group_sizes(batch)
        usable = batch.valid & (sizes[batch.group] >= 2)
        owner = batch.sample_of_token
        mask = batch.loss_mask & usable[owner]
        advantages = per_sample[owner].masked_fill(~mask, 0.0).to(torch.float32)
        credited = batch.with_(advantages=advantages, returns=advantages, loss_mask=mask, valid=usable)
        if self.old_logprobs == "rollout":
            credited = credited.with_(old_logprobs=batch.rollout_logprobs)
        return credited, _group_metrics(batch, sizes)

    def loss(self, batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        """Clipped surrogate - entropy_coef * entropy + kl_coef * KL, per token."""
        config, mask = self.config, batch.loss_mask
        assert batch.advantages is not None
        old = out.logprobs.detach() if self.old_logprobs == "current" else batch.old_logprobs
        assert old is not None, "the old log-probs are annotated before the first step"
        clip = clipped_surrogate(
            out.logprobs, old, batch.advantages, config.clip_low, config.clip_high, config.clip_dual
        )
        terms = clip.terms
        if config.entropy_coef > 0:
            terms = terms - config.entropy_coef * out.entropy
        count = mask.sum()
        metrics: Metrics = {
            "policy/entropy": _mean(out.entropy, mask, count),
            "policy/clip_fraction": _mean(clip.clipped.to(torch.float32), mask, count),
            "policy/ratio_max": Max(clip.ratio.masked_fill(~mask, -math.inf).max()),
            "policy/kl_old": _mean(KL_ESTIMATORS["k3"](out.logprobs.detach(), old), mask, count),
        }
        if batch.ref_logprobs is not None:
            kl = KL_ESTIMATORS[config.kl_estimator](out.logprobs, batch.ref_logprobs)
            metrics["policy/kl_ref"] = _mean(kl, mask, count)
            if config.kl_coef > 0:
                terms = terms + config.kl_coef * kl
        return LossTerms(terms, metrics)


def _mean(column: Tensor, mask: Tensor, count: Tensor) -> Mean:
    return Mean(torch.where(mask, column.detach(), torch.zeros_like(column)).sum(), count)


def _group_metrics(batch: TrainBatch, sizes: Tensor) -> Metrics:
    """How many groups there were to learn from, and how many taught nothing."""
    members = one_per_trajectory(batch)
    groups = [batch.rewards[members][batch.group[members] == g] for g in range(len(sizes))]
    zero = sum(1 for rewards in groups if len(rewards) >= 2 and bool((rewards == rewards[0]).all()))
    return {
        "groups/total": Total(len(sizes)),
        "groups/zero_variance": Mean(zero, len(sizes)),
        "groups/too_small": Total(int((sizes < 2).sum())),
    }
