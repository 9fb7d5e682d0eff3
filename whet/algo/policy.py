"""A policy-gradient algorithm put together from its parts: a credit assignment, a policy loss, and what all of them share.

Shared are the old log-probs, the KL to a reference in the loss or in the reward, the entropy bonus, off-policy correction
and sequence masking, distillation, whitening and the reducer. An algorithm's file gives the credit and the defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.algo.base import LossDetail, LossTerms, Need, StepPlan
from whet.algo.credit import Assign, group_metrics
from whet.algo.offpolicy import corrected, corrected_step, correction_metrics
from whet.algo.policy_config import NEEDS_CHOICE, ONE_RATIO, PROPORTIONAL, PolicyConfig, check_compared
from whet.algo.reward_kl import RewardKL
from whet.algo.surrogates import build_surrogate
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.choices import Clip
from whet.core.correction import geometric_weight
from whet.core.covariance import covariances, draws_of, pick_between, pick_largest, share_of
from whet.core.distill import distilled
from whet.core.kl import KL_ESTIMATORS
from whet.core.losses import ClipTerms, ratio_of, sequence_mask
from whet.core.weights import Reducer, build_reducer
from whet.core.whiten import whiten
from whet.observe.metrics import Max, Mean, Metrics
from whet.types import JSON


@dataclass(frozen=True, slots=True)
class LossParts:
    """Parts of a loss, per token; reduced by `sum(weights * terms)`. Each [T]."""

    terms: Tensor
    """policy - entropy_coef * entropy + kl_coef * KL."""
    policy: Tensor
    """The policy loss, corrected and masked."""
    clip: ClipTerms
    old: Tensor
    """The log-probs that the ratio is over."""
    kl: Tensor | None
    """KL to the reference, where there is one."""
    correction: Tensor | None
    """Weights that the policy loss was multiplied by."""
    masked: Tensor | None
    """False where sequence masking dropped a token. bool"""


class PolicyGradient:
    """An `Algorithm` from a credit assignment and a policy loss.

    Args:
        name: name of the algorithm, for error messages.
        config: its settings.
        plan: optimizer steps of a rollout.
        assign: its credit assignment.
        needs: columns that the credit needs on the batch.
        compares: True if it compares the samples of a prompt with each other.
    """

    def __init__(
        self,
        name: str,
        config: PolicyConfig,
        plan: StepPlan,
        assign: Assign,
        *,
        needs: frozenset[Need] = frozenset(),
        compares: bool = False,
    ) -> None:
        self.name = name
        self.config = config
        scaled = config.reducer in ("constant", "constant_length")
        limit = float(plan.max_tokens) if scaled and plan.max_tokens is not None else None
        self.reducer: Reducer = build_reducer(config.reducer, config.reducer_scale if config.reducer_scale is not None else limit)
        self.entropy_grad = config.entropy_coef > 0
        self.reward_kl = RewardKL(config.kl_reward)
        self._assign = assign
        self._surrogate = build_surrogate(config.loss, config)
        if compares and plan.samples_per_prompt is not None:
            check_compared(name, plan.samples_per_prompt)
        early = config.reads_logprobs_early or Need.OLD_LOGPROBS in needs
        self.old_logprobs = config.old_logprobs
        if self.old_logprobs == "auto" and config.correction.named.mode == "clip":
            self.old_logprobs = "rollout"
        elif self.old_logprobs == "auto":
            self.old_logprobs = "current" if plan.num_steps == 1 and not early else "recompute"
        if self.old_logprobs == "current" and plan.num_steps > 1:
            raise ValueError(
                f"algo.old_logprobs=current is right only if a rollout feeds one optimizer step, but here it feeds {plan.num_steps}; "
                "use recompute or rollout"
            )
        found = set(needs) - {Need.OLD_LOGPROBS}
        if self.old_logprobs == "recompute" or config.correction.used:
            found.add(Need.OLD_LOGPROBS)
        if config.keeps_reference:
            found.add(Need.REF_LOGPROBS)
        if config.distill_coef > 0:
            found.add(Need.TEACHER_LOGPROBS)
        self.needs = frozenset(found)

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Advantages and returns of every trained token; samples that teach nothing stop training."""
        config = self.config
        metrics = group_metrics(batch)
        if config.correction.used:
            assert batch.old_logprobs is not None, "annotated before credit"
            metrics |= correction_metrics(batch, batch.old_logprobs, config.correction)
            batch = corrected(batch, batch.old_logprobs, config.correction)
        before = batch.old_logprobs if config.correction.used else self._old(batch)
        batch = batch.with_(old_logprobs=self._old(batch))
        given = batch.token_rewards
        if config.kl_reward.coef > 0:
            batch, found = self.reward_kl.penalize(batch)
            metrics |= found
        credit = self._assign(batch)
        mask = batch.loss_mask & credit.usable[batch.sample_of_token]
        advantages = credit.advantages.double()
        if config.distill_coef > 0:
            assert batch.old_logprobs is not None and batch.teacher_logprobs is not None, "annotated before credit"
            advantages = distilled(advantages, batch.old_logprobs, batch.teacher_logprobs, config.distill_coef)
            metrics["distill/kl"] = _mean(batch.old_logprobs - batch.teacher_logprobs, mask, mask.sum())
        if config.whiten and bool(mask.any()):
            advantages = whiten(advantages, mask)
        columns = {"advantages": advantages, "returns": credit.returns.double()}
        masked = {name: column.masked_fill(~mask, 0.0).to(torch.float32) for name, column in columns.items()}
        if credit.td_errors is not None:
            masked["td_errors"] = credit.td_errors.to(torch.float32)
        return batch.with_(**masked, old_logprobs=before, loss_mask=mask, valid=credit.usable, token_rewards=given), metrics

    def _old(self, batch: TrainBatch) -> Tensor | None:
        """The denominator of the ratio, where it is known before the step: the engine's log-probs or the trainer's. [T]"""
        return batch.rollout_logprobs if self.old_logprobs == "rollout" else batch.old_logprobs

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """The batch of an optimizer step with the correction applied, and with the tokens that a
        covariance criterion picks."""
        config, old = self.config, self._old(batch)
        if config.correction.used:
            batch = corrected_step(batch, config.correction)
        if config.loss.name in NEEDS_CHOICE:
            assert old is not None and batch.advantages is not None, "annotated before the step"
            mask = batch.loss_mask
            covariance = covariances(old, batch.advantages, mask)
            wanted = share_of(mask, config.loss.covariance_share)
            if config.loss.name == "kl_cov":
                chosen = pick_largest(mask, covariance, wanted, draws_of(batch))
            else:
                low, high = config.loss.covariance_bounds
                chosen = pick_between(mask, covariance, wanted, low, high, draws_of(batch))
            batch = batch.with_(chosen=chosen)
        return batch

    def has_gradient(self, batch: TrainBatch) -> Tensor:
        """Every trained token where the loss has a term besides the surrogate, or is somebody else's; else those with an advantage and a
        weight. [T] bool"""
        config, mask = self.config, batch.loss_mask
        further = config.entropy_coef > 0 or (config.kl_coef > 0 and batch.ref_logprobs is not None)
        if further or config.loss.name not in PROPORTIONAL or self._has_another_loss:
            return mask
        assert batch.advantages is not None and batch.weights is not None
        return mask & (batch.advantages != 0) & (batch.weights != 0)

    def loss(self, batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        """Policy loss - entropy_coef * entropy + kl_coef * KL, per token."""
        parts = self.parts(batch, out)
        mask = batch.loss_mask
        count = mask.sum()
        metrics: Metrics = {
            "policy/entropy": _mean(out.entropy, mask, count),
            "policy/clip_fraction": _mean(parts.clip.clipped.to(torch.float32), mask, count),
            "policy/ratio_max": Max(parts.clip.ratio.masked_fill(~mask, -math.inf).max()),
            "policy/kl_old": _mean(KL_ESTIMATORS["k3"](out.logprobs.detach(), parts.old), mask, count),
        }
        if parts.kl is not None:
            metrics["policy/kl_ref"] = _mean(parts.kl, mask, count)
        if parts.correction is not None:
            metrics["policy/correction"] = _mean(parts.correction, mask, count)
        if parts.masked is not None:
            metrics["policy/sequence_masked"] = _mean((~parts.masked).to(torch.float32), mask, count)
        return LossTerms(parts.terms, metrics, lambda: self._detail(batch, out, parts))

    def _detail(self, batch: TrainBatch, out: TokenOutputs, parts: LossParts) -> LossDetail:
        """Numbers of each token, with the reason why it has no gradient."""
        clip = parts.clip
        above = out.logprobs.detach() > parts.old if self.config.loss.name in ONE_RATIO else clip.ratio > 1
        codes = torch.zeros(batch.num_tokens, dtype=torch.int8, device=above.device)
        for where, code in (
            (clip.clipped & above, Clip.HIGH),
            (clip.clipped & ~above, Clip.LOW),
            (clip.dual, Clip.DUAL),
            (batch.chosen, Clip.COVARIANCE),
            (None if parts.masked is None else ~parts.masked, Clip.SEQUENCE),
            (None if batch.kept is None else ~batch.kept, Clip.REJECTED),
        ):
            if where is not None:
                codes = codes.masked_fill(where, int(code))
        return LossDetail(parts.old, clip.ratio, codes, parts.correction)

    @property
    def _has_another_loss(self) -> bool:
        """True if `loss` or `parts` was replaced, in a subclass or on this object."""
        mine = (PolicyGradient.loss, PolicyGradient.parts)
        return any(getattr(found, "__func__", None) is not own for found, own in zip((self.loss, self.parts), mine, strict=True))

    def parts(self, batch: TrainBatch, out: TokenOutputs) -> LossParts:
        """The loss and what it is made of."""
        config = self.config
        assert batch.advantages is not None
        old = out.logprobs.detach() if self.old_logprobs == "current" else self._old(batch)
        assert old is not None, "the old log-probs are annotated before the first step"
        clip = self._surrogate(batch, out.logprobs, old, batch.advantages)
        policy, correction, kept = clip.terms, None, None
        if config.correction.used:
            correction = batch.correction
            assert correction is not None, "found with the credit"
            if config.loss.name in ONE_RATIO:
                correction = geometric_weight(batch, correction)
            policy = policy * correction
        if config.mask_delta is not None:
            kept = sequence_mask(batch, out.logprobs, old, batch.advantages, config.mask_delta)
            policy = policy * kept
        terms, kl = policy, None
        if config.entropy_coef > 0:
            terms = terms - config.entropy_coef * out.entropy
        if batch.ref_logprobs is not None:
            ratio = ratio_of(out.logprobs - old) if config.kl_unbiased else None
            kl = KL_ESTIMATORS[config.kl_estimator](out.logprobs, batch.ref_logprobs, ratio)
            if config.kl_coef > 0:
                terms = terms + config.kl_coef * kl
        return LossParts(terms, policy, clip, old, kl, correction, kept)

    def state(self) -> JSON:
        """State for a resumed run: the coefficient of the KL in the reward, if it adapts."""
        return {} if self.config.kl_reward.target is None else {"kl_reward_coef": self.reward_kl.coef}

    def restore(self, state: JSON) -> None:
        """Restore `state`. A coefficient that does not adapt keeps its configured value."""
        if self.config.kl_reward.target is not None:
            self.reward_kl.coef = float(state.get("kl_reward_coef", self.reward_kl.coef))


def _mean(column: Tensor, mask: Tensor, count: Tensor) -> Mean:
    return Mean(torch.where(mask, column.detach(), torch.zeros_like(column)).sum(), count)
