from __future__ import annotations

import pytest
import torch

from whet.core.covariance import clip_cov, covariances, kl_cov, pick_between, pick_largest, share_of

MASK = torch.tensor([True, True, False, True, True])
LOGPROBS = torch.tensor([-1.0, -3.0, -9.0, -2.0, -0.5])
ADVANTAGES = torch.tensor([1.0, -2.0, 9.0, 0.5, 2.0])


def test_the_means_are_over_the_masked_tokens():
    kept = MASK.tolist()
    a = [float(x) for x, k in zip(ADVANTAGES, kept, strict=True) if k]
    p = [float(x) for x, k in zip(LOGPROBS, kept, strict=True) if k]
    expected = [(x - sum(a) / 4) * (y - sum(p) / 4) for x, y in zip(a, p, strict=True)]
    assert covariances(LOGPROBS, ADVANTAGES, MASK)[MASK].tolist() == pytest.approx(expected)


def test_random_ones_in_between_and_the_same_for_the_same_seed():
    covariance = torch.tensor([0.5, 2.0, 2.0, 3.0, 6.0])
    draws = [pick_between(MASK, covariance, 1, 1.0, 5.0, torch.Generator().manual_seed(seed)).tolist() for seed in range(20)]
    assert draws[3] == pick_between(MASK, covariance, 1, 1.0, 5.0, torch.Generator().manual_seed(3)).tolist()
    assert {tuple(d) for d in draws} == {(False, True, False, False, False), (False, False, False, True, False)}
    assert pick_between(MASK, covariance, 9, 1.0, 5.0, torch.Generator()).tolist() == [False, True, False, True, False]
    assert not pick_between(MASK, covariance, 9, 7.0, 8.0, torch.Generator()).any()


def test_the_largest_among_the_masked():
    covariance = torch.tensor([0.5, 2.0, 99.0, 3.0, -6.0])
    assert pick_largest(MASK, covariance, 2).tolist() == [False, True, False, True, False]
    assert not pick_largest(torch.zeros_like(MASK), covariance, 2).any()


@pytest.mark.parametrize(("share", "count"), [(0.0002, 1), (0.5, 2), (1.0, 4)])
def test_a_share_is_one_token_at_least(share, count):
    assert share_of(MASK, share) == count


def test_the_chosen_tokens_are_stopped_or_penalised():
    logprobs = LOGPROBS.clone().requires_grad_(True)
    old, chosen = LOGPROBS - 0.1, torch.tensor([True, False, False, False, False])
    clipped = clip_cov(logprobs, old, ADVANTAGES, chosen, 0.2, 0.2)
    clipped.terms.sum().backward()
    assert logprobs.grad[0] == 0 and bool((logprobs.grad[1:] != 0).all()) and bool(clipped.clipped[0])
    ratio = torch.tensor(0.1).exp()
    held = kl_cov(logprobs, old, ADVANTAGES, chosen, 0.5).terms.detach()
    assert held[0].item() == pytest.approx(float(-ratio * 1.0) + 0.5 * 0.1, abs=1e-5)
    assert held[1].item() == pytest.approx(float(ratio) * 2.0, abs=1e-5)
