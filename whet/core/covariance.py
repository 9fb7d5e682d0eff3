"""Covariance of advantages and log-probs: the tokens that drive the entropy down, and two ways to hold them back.

Source: "The Entropy Mechanism of Reinforcement Learning", arXiv 2505.22617, section 4. The covariance is over all trained
tokens of a step, so the tokens are picked once, on the whole of it, before it is cut into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whet.core.batch import TrainBatch
from whet.core.losses import ClipTerms, clipped_terms, ratio_of
from whet.core.whiten import masked_mean


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(log p - mean log p) of each token; the means are over the masked ones. [T], detached"""
    logprobs = logprobs.detach()
    return (advantages - masked_mean(advantages, mask)) * (logprobs - masked_mean(logprobs, mask))


def share_of(mask: Tensor, share: float) -> int:
    """Number of tokens in a share of the masked ones: at least one."""
    return max(int(share * int(mask.sum())), 1)


def draws_of(batch: TrainBatch) -> Tensor:
    """A number for each token, as good as random: a hash of its sample's tokens and of its place among them. [T] int64

    So what is drawn by it depends neither on the order of the samples nor on when a run was started.
    """
    owner = batch.sample_of_token
    place = torch.arange(batch.num_tokens, device=owner.device) - batch.starts[owner]
    of_samples = torch.zeros(batch.num_samples, dtype=torch.int64, device=owner.device)
    of_samples = of_samples.index_add(0, owner, _mixed(_mixed(batch.tokens) + place))
    return _mixed(of_samples[owner] ^ _mixed(place))


def pick_between(candidates: Tensor, covariance: Tensor, wanted: int, low: float, high: float, draws: Tensor) -> Tensor:
    """Clip-Cov's tokens: up to `wanted` among the candidates whose covariance is in (low, high), by least `draws`. [T] bool

    Of tokens that drew the same (their samples are equal so far as tokens go), the lower covariance comes first.
    """
    places = (candidates & (covariance > low) & (covariance < high)).nonzero().squeeze(-1)
    return _chosen(candidates, _sorted(places, covariance, draws)[:wanted])


def pick_largest(candidates: Tensor, covariance: Tensor, wanted: int, draws: Tensor) -> Tensor:
    """KL-Cov's tokens: the candidates with the largest covariance; of equal ones, those with the least `draws`. [T] bool"""
    return _chosen(candidates, _sorted(candidates.nonzero().squeeze(-1), draws, -covariance)[:wanted])


def _sorted(places: Tensor, second: Tensor, first: Tensor) -> Tensor:
    """Places by a first column, and by a second one where that is equal."""
    places = places[second[places].argsort(stable=True)]
    return places[first[places].argsort(stable=True)]


def _chosen(candidates: Tensor, places: Tensor) -> Tensor:
    chosen = torch.zeros_like(candidates)
    chosen[places] = True
    return chosen


def _mixed(number: Tensor) -> Tensor:
    """A hash of each integer, one to one: splitmix64's last steps. Source: G. Steele et al., "Fast Splittable Pseudorandom Number
    Generators", 2014. int64"""
    number = number + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # torch shifts the sign in; the hash wants zeros.
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return number


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, chosen: Tensor, clip_low: float, clip_high: float
) -> ClipTerms:
    """The clipped surrogate, with nothing from the chosen tokens."""
    clip = clipped_terms(logprobs - old_logprobs, advantages, clip_low, clip_high)
    return ClipTerms(clip.terms.masked_fill(chosen, 0.0), clip.ratio, clip.clipped | chosen, clip.dual)


def kl_cov(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, chosen: Tensor, kl_coef: float) -> ClipTerms:
    """-r A, plus kl_coef |log r| for the chosen tokens; nothing is clipped, as published: the penalty is what holds r."""
    log_ratio = logprobs - old_logprobs
    ratio = ratio_of(log_ratio)
    penalty = torch.where(chosen, kl_coef * log_ratio.abs(), torch.zeros_like(ratio))
    never = torch.zeros_like(chosen)
    return ClipTerms(-ratio * advantages + penalty, ratio.detach(), never, never)
