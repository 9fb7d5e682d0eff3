"""Settings that every policy-gradient algorithm has: its policy loss, its KLs, its old log-probs and its reducer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from whet.algo.correction_config import CorrectionConfig
from whet.config import Config, refuse_unread
from whet.config.errors import nearest
from whet.core.choices import KLName, ReducerName, ScaledReducerName, SequenceGradient

LossName = Literal["clip", "sequence", "cispo", "sapo", "reinforce", "geometric_mean", "clip_cov", "kl_cov"]
READERS: dict[str, tuple[LossName, ...]] = {
    "sequence_gradient": ("sequence",),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "covariance_share": ("clip_cov", "kl_cov"),
    "covariance_bounds": ("clip_cov",),
    "covariance_kl_coef": ("kl_cov",),
}
"""Losses that read each setting that only some of them have."""
CLIP_READERS: dict[str, tuple[LossName, ...]] = {
    "clip_low": ("clip", "sequence", "cispo", "geometric_mean", "clip_cov"),
    "clip_high": ("clip", "sequence", "cispo", "geometric_mean", "clip_cov"),
    "clip_dual": ("clip", "sequence"),
}
"""Losses that read each bound of the ratio. These settings are in the same table as the loss."""
NEEDS_CHOICE = frozenset({"clip_cov", "kl_cov"})
"""Losses that read `chosen`, which is made on the whole step."""
PROPORTIONAL = frozenset({"clip", "sequence", "cispo", "sapo", "reinforce", "geometric_mean", "clip_cov"})
"""Losses that are 0, with their gradient, where all advantages of a sample are 0."""
ONE_RATIO = frozenset({"geometric_mean"})
"""Losses with one ratio per sample, so that importance weights are averaged over it too."""


class LossConfig(Config):
    """The policy loss, and settings that only some losses have."""

    name: str = "clip"
    """Policy loss: clip, sequence (GSPO), cispo, sapo, reinforce, geometric_mean (GMPO), clip_cov,
    kl_cov, or an import reference `module:function` called with (batch, logprobs, old_logprobs,
    options) that returns core.losses.ClipTerms."""
    sequence_gradient: SequenceGradient = "token"
    """sequence: path of the gradient of a sample's ratio: token (verl's form) or sequence (slime's)."""
    tau_positive: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """sapo: steepness of the gate for positive advantages."""
    tau_negative: float = Field(default=1.05, gt=0, allow_inf_nan=False)
    """sapo: steepness of the gate for negative advantages."""
    covariance_share: float = Field(default=0.0002, gt=0, le=1)
    """clip_cov, kl_cov: share of the step's tokens that is held back."""
    covariance_bounds: tuple[float, float] = (1.0, 5.0)
    """clip_cov: range of covariance from which tokens are chosen."""
    covariance_kl_coef: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """kl_cov: weight of |log ratio| for the chosen tokens."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Options of a loss of your own."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> LossConfig:
        known = get_args(LossName)
        if self.name not in known and ":" not in self.name:
            near = nearest(self.name, known)
            hint = f"did you mean {' or '.join(near)}? Else " if near else ""
            raise ValueError(f"name: there is no policy loss {self.name!r}; {hint}give one of {', '.join(known)}, or module:function")
        if self.covariance_bounds[0] >= self.covariance_bounds[1]:
            raise ValueError(f"covariance_bounds={list(self.covariance_bounds)}: the first must be below the second")
        for key, readers in READERS.items():
            if self.name not in readers:
                refuse_unread(self, [key], f"with name={self.name}", f"set name={' or '.join(readers)}")
        if ":" not in self.name:
            refuse_unread(self, ["options"], f"with name={self.name}, which is built in", "name a module:function")
        return self


class RewardKLConfig(Config):
    """KL(policy || reference) as a part of the reward."""

    coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Each trained token's reward is lowered by coef times its KL."""
    estimator: KLName = "k1"
    """Estimator of the KL from the sampled tokens."""
    target: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Adapt the coefficient so that the KL of a trajectory's mean token stays near this; unset: a fixed coefficient."""
    horizon: int = Field(default=10_000, gt=0)
    """Trajectories over which a deviation of 20% changes the coefficient by 20%."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> RewardKLConfig:
        if self.coef == 0:
            refuse_unread(self, ["target", "horizon"], "with coef=0, from which no coefficient adapts", "set coef above 0")
        if self.target is None:
            refuse_unread(self, ["horizon"], "with a fixed coefficient", "set target")
        return self


class PolicyConfig(Config):
    """Settings of every policy-gradient algorithm."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped from above at 1 + clip_high (0.28 is DAPO's clip-higher)."""
    clip_dual: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """Dual clip: the term of a token with negative advantage is at most clip_dual * |advantage|."""
    reducer: ReducerName | ScaledReducerName = "sample_mean"
    """Weights of tokens in the loss. sample_mean: every trajectory counts the same; token_mean: every
    token does; group_mean: every group does; token_sum_mean: sums over tokens, mean over trajectories;
    sequence_mean, sequence_sum: the same two over samples; constant_length, constant: sums over
    reducer_scale."""
    reducer_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Divisor of constant_length and constant; unset: the token limit of a trajectory, if it is known."""
    entropy_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the entropy bonus."""
    kl_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of KL(policy || reference) in the loss."""
    kl_estimator: KLName = "k3"
    """Estimator of the KL from the sampled tokens."""
    kl_unbiased: bool = False
    """Multiply the estimate by pi / pi_old, gradient too: then the tokens that the old policy sampled give no bias."""
    reference: bool | None = None
    """Keep a frozen copy of the first policy. Unset: only if a KL has a weight; true observes the KL at 0 too."""
    old_logprobs: Literal["auto", "recompute", "rollout", "current"] = "auto"
    """Denominator of the ratio. recompute: the trainer's log-probs before the first step; rollout: the
    engine's; current: the present ones, detached (correct only if a rollout feeds one step, and nothing
    needs them before it, as correction does); auto: current if that is correct, else recompute."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """The policy loss."""
    whiten: bool = False
    """Shift and scale advantages to mean 0 and std 1 over the rollout's trained tokens."""
    kl_reward: RewardKLConfig = Field(default_factory=RewardKLConfig)
    """KL in the reward."""
    distill_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """On-policy distillation: distill_coef * log pi / pi_teacher of its token is subtracted from every
    advantage."""
    mask_delta: float | None = Field(default=None, ge=0)
    """Off-policy sequence masking: drop tokens with a negative advantage from samples whose mean log pi_old / pi exceeds
    this (slime's opsm_delta is 1e-4)."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """Off-policy correction between engine and trainer."""

    @model_validator(mode="after")
    def _consistent(self) -> PolicyConfig:
        for name, coef in (("kl_coef", self.kl_coef), ("kl_reward.coef", self.kl_reward.coef)):
            if coef > 0 and self.reference is False:
                raise ValueError(f"{name} is {coef} but reference is false: there is nothing to measure the KL to")
        self._check_correction()
        self._check_old_logprobs()
        if self.reducer not in get_args(ScaledReducerName):
            refuse_unread(self, ["reducer_scale"], f"with reducer={self.reducer}", "set reducer=constant_length or constant")
        if not self.keeps_reference:
            why, remedy = "without a KL to a reference", "set kl_coef, or reference=true to observe it"
            refuse_unread(self, ["kl_unbiased", "kl_estimator"], why, remedy)
        for key, losses in CLIP_READERS.items():
            if self.loss.name not in losses:
                refuse_unread(self, [key], f"with loss.name={self.loss.name}", f"set loss.name={' or '.join(losses)}")
        return self

    def _check_old_logprobs(self) -> None:
        early = self.reads_logprobs_early
        if self.old_logprobs != "current":
            return
        if early:
            raise ValueError(
                f"old_logprobs=current is known in the step alone, but needed before it by {' and '.join(early)}; use recompute or auto"
            )
        refuse_unread(self, ["mask_delta"], "with old_logprobs=current, from which no sample is far", "use recompute or rollout")

    def _check_correction(self) -> None:
        correction, mode = self.correction, self.correction.named.mode
        if correction.weights is not None and (self.old_logprobs == "rollout" or mode == "clip"):
            raise ValueError(
                "old_logprobs=rollout puts the engine's policy into the ratio already, so correction.weights would count it twice; "
                "use recompute, or leave out weights"
            )
        wanted = {"clip": ("clip", ("auto", "rollout")), "reinforce": ("reinforce", ("auto", "recompute"))}
        if mode in wanted:
            loss, old = wanted[mode]
            if self.loss.name != loss:
                raise ValueError(f"correction.preset={correction.preset} is of the loss {loss}, not {self.loss.name}: set loss.name={loss}")
            if self.old_logprobs not in old:
                raise ValueError(
                    f"correction.preset={correction.preset} takes old_logprobs={old[1]}, not {self.old_logprobs}: leave out old_logprobs"
                )

    @property
    def keeps_reference(self) -> bool:
        return (self.kl_coef > 0 or self.kl_reward.coef > 0) if self.reference is None else self.reference

    @property
    def reads_logprobs_early(self) -> list[str]:
        """The settings for which the trainer's log-probs must be there before a step is taken."""
        readers = {
            "kl_reward": self.kl_reward.coef > 0,
            "distill_coef": self.distill_coef > 0,
            "correction": self.correction.used,
            f"loss.name={self.loss.name}": self.loss.name in NEEDS_CHOICE,
        }
        return [name for name, reads in readers.items() if reads]


def check_compared(name: str, samples_per_prompt: int) -> None:
    """Refuse too few samples for an algorithm that compares those of a prompt.

    Raises:
        ValueError: there is one.
    """
    if samples_per_prompt < 2:
        raise ValueError(
            f"{name} compares the samples of a prompt with each other: batch.samples_per_prompt must be at least 2, "
            f"not {samples_per_prompt}"
        )
