"""Covariance of advantages and log-probs: the tokens that drive the entropy down, and two ways to hold them back.

Source: "The Entropy Mechanism of Reinforcement Learning", arXiv 2505.22617, section 4. The covariance is over all trained
tokens of a step, so the tokens are picked once, on the whole of it, before it is cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.core.losses import ClipTerms, clipped_terms
from whet.core.whiten import masked_mean


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(log p - mean log p) of each token; the means are over the masked ones. [T], detached"""
    logprobs = logprobs.detach()
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def share_of(mask: Tensor, share: float) -> int:
    """How many tokens a share of the masked ones is: at least one."""
    return max(int(share * int(mask.sum())), 1)


def pick_between(candidates: Tensor, covariance: Tensor, wanted: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    """Clip-Cov's tokens: up to `wanted` random ones among the candidates whose covariance is in (low, high). [T] bool"""
    places = (candidates & (covariance > low) & (covariance < high)).nonzero().squeeze(-1)
    order = torch.randperm(len(places), generator=generator).to(places.device)
    chosen = torch.zeros_like(candidates)
    chosen[places[order[:wanted]]] = True
    return chosen


def pick_largest(candidates: Tensor, covariance: Tensor, wanted: int) -> Tensor:
    """KL-Cov's tokens: the candidates with the largest covariance. [T] bool"""
    chosen = torch.zeros_like(candidates)
    places = candidates.nonzero().squeeze(-1)
    chosen[places[covariance[places].topk(min(wanted, len(places))).indices]] = True
    return chosen


def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, chosen: Tensor, clip_low: float, clip_high: float
) -> ClipTerms:
    """The clipped surrogate, with nothing from the chosen tokens."""
    clip = clipped_terms(logprobs - old_logprobs, advantages, clip_low, clip_high)
    return ClipTerms(clip.terms.masked_fill(chosen, 0.0), clip.ratio, clip.clipped | chosen, clip.dual)


def kl_cov(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, chosen: Tensor, kl_coef: float) -> ClipTerms:
    """-r A, plus kl_coef |log r| for the chosen tokens; nothing is clipped, as published: the penalty is what holds r."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    penalty = torch.where(chosen, kl_coef * log_ratio.abs(), torch.zeros_like(ratio))
    never = torch.zeros_like(chosen)
    return ClipTerms(-ratio * advantages + penalty, ratio.detach(), never, never)
