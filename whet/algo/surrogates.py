"""Policy losses by name: each makes one term per token out of log-probs, old log-probs and advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor

from whet.config import Config, refuse_unread, resolve_callable
from whet.core.batch import TrainBatch
from whet.core.covariance import clip_cov, kl_cov
from whet.core.losses import (
    ClipTerms,
    SequenceGradient,
    cispo,
    clipped_surrogate,
    clipped_terms,
    geometric_mean,
    reinforce,
    sapo,
    sequence_log_ratio,
)


class LossConfig(Config):
    """Which policy loss, and what only some of them have."""

    name: str = "clip"
    """clip, sequence (GSPO), cispo, sapo, reinforce, geometric_mean (GMPO), clip_cov, kl_cov, or an import reference
    `module:function` called with (batch, logprobs, old_logprobs, options) that returns core.losses.ClipTerms."""
    sequence_gradient: SequenceGradient = "token"
    """sequence: where the gradient of a sample's ratio goes: token (verl's form) or sequence (slime's)."""
    tau_positive: float = Field(default=1.0, gt=0)
    """sapo: how fast the gate closes for positive advantages."""
    tau_negative: float = Field(default=1.05, gt=0)
    """sapo: the same for negative ones."""
    covariance_share: float = Field(default=0.0002, gt=0, le=1)
    """clip_cov, kl_cov: share of the step's tokens that is held back."""
    covariance_bounds: tuple[float, float] = (1.0, 5.0)
    """clip_cov: only tokens with a covariance in between."""
    covariance_kl_coef: float = Field(default=0.1, ge=0)
    """kl_cov: weight of |log ratio| for the chosen tokens."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Handed to a loss of your own."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> LossConfig:
        for key, readers in READERS.items():
            if self.name not in readers:
                refuse_unread(self, [key], f"with name={self.name}", f"set name={' or '.join(readers)}")
        if ":" not in self.name:
            refuse_unread(self, ["options"], f"with name={self.name}, which is built in", "name a module:function")
        return self


class Clips(Protocol):
    """The bounds of the ratio."""

    @property
    def clip_low(self) -> float: ...
    @property
    def clip_high(self) -> float: ...
    @property
    def clip_dual(self) -> float | None: ...


Surrogate = Callable[[TrainBatch, Tensor, Tensor, Tensor], ClipTerms]
"""A micro-batch, log-probs, old log-probs and advantages to terms."""
LossName = Literal["clip", "sequence", "cispo", "sapo", "reinforce", "geometric_mean", "clip_cov", "kl_cov"]
READERS: dict[str, tuple[LossName, ...]] = {
    "sequence_gradient": ("sequence",),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "covariance_share": ("clip_cov", "kl_cov"),
    "covariance_bounds": ("clip_cov",),
    "covariance_kl_coef": ("kl_cov",),
}
"""Which losses read a setting that only some of them have."""
CLIP_READERS: dict[str, tuple[LossName, ...]] = {
    "clip_low": ("clip", "sequence", "cispo", "geometric_mean", "clip_cov"),
    "clip_high": ("clip", "sequence", "cispo", "geometric_mean", "clip_cov"),
    "clip_dual": ("clip", "sequence"),
}
"""The same of the bounds of the ratio, which stand beside the loss."""
NEEDS_CHOICE = frozenset({"clip_cov", "kl_cov"})
"""Losses that read `chosen`, which is made on the whole step."""
ONE_RATIO = frozenset({"geometric_mean"})
"""Losses with one ratio per sample, so that importance weights are averaged over it too."""


def build_surrogate(loss: LossConfig, clips: Clips) -> Surrogate:
    """The configured policy loss.

    Raises:
        ValueError: if there is none of that name.
    """
    low, high, dual = clips.clip_low, clips.clip_high, clips.clip_dual

    def sequence(batch: TrainBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> ClipTerms:
        log_ratio = sequence_log_ratio(batch, logprobs, old, loss.sequence_gradient)
        return clipped_terms(log_ratio, advantages, low, high, dual)

    def chosen(batch: TrainBatch) -> Tensor:
        return torch.zeros_like(batch.loss_mask) if batch.chosen is None else batch.chosen

    table: dict[LossName, Surrogate] = {
        "clip": lambda b, lp, old, adv: clipped_surrogate(lp, old, adv, low, high, dual),
        "sequence": sequence,
        "cispo": lambda b, lp, old, adv: cispo(lp, old, adv, low, high),
        "sapo": lambda b, lp, old, adv: sapo(lp, old, adv, loss.tau_positive, loss.tau_negative),
        "reinforce": lambda b, lp, old, adv: reinforce(lp, old, adv),
        "geometric_mean": lambda b, lp, old, adv: geometric_mean(b, lp, old, adv, low, high),
        "clip_cov": lambda b, lp, old, adv: clip_cov(lp, old, adv, chosen(b), low, high),
        "kl_cov": lambda b, lp, old, adv: kl_cov(lp, old, adv, chosen(b), loss.covariance_kl_coef),
    }
    for name, surrogate in table.items():
        if name == loss.name:
            return surrogate
    if ":" not in loss.name:
        raise ValueError(f"loss.name: there is no policy loss {loss.name!r}; give one of {', '.join(table)}, or module:function")
    own = resolve_callable(loss.name, kind="policy loss", given=["batch", "logprobs", "old_logprobs", "options"])
    options = dict(loss.options)
    return lambda batch, logprobs, old, advantages: own(batch.with_(advantages=advantages), logprobs, old, options)
