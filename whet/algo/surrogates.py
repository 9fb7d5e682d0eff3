"""Policy losses by name: each makes one term per token out of log-probs, old log-probs and advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from whet.algo.policy_config import LossConfig, LossName
from whet.config import resolve_callable
from whet.core.batch import TrainBatch
from whet.core.covariance import clip_cov, kl_cov
from whet.core.losses import (
    ClipTerms,
    cispo,
    clipped_surrogate,
    clipped_terms,
    geometric_mean,
    reinforce,
    sapo,
    sequence_log_ratio,
)


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


def build_surrogate(loss: LossConfig, clips: Clips) -> Surrogate:
    """The configured policy loss.

    Raises:
        ValueError: if the user's own cannot be imported, or called as it has to be.
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
    own = resolve_callable(loss.name, kind="policy loss", given=["batch", "logprobs", "old_logprobs", "options"])
    options = dict(loss.options)
    return lambda batch, logprobs, old, advantages: own(batch.with_(advantages=advantages), logprobs, old, options)
