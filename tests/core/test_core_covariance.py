from __future__ import annotations

import pytest
import torch

from whet.core.batch import batch_of
from whet.core.covariance import _mixed, clip_cov, covariances, draws_of, kl_cov, pick_between, pick_largest, share_of
from whet.types import Origin, Sample

MASK = torch.tensor([True, True, False, True, True])
LOGPROBS = torch.tensor([-1.0, -3.0, -9.0, -2.0, -0.5])
ADVANTAGES = torch.tensor([1.0, -2.0, 9.0, 0.5, 2.0])


def rollout_of(rows: list[list[int]]):
    """Samples of the environment's tokens alone."""
    return batch_of(
        [
            Sample(
                tokens=tuple(row),
                origin=(Origin.ENVIRONMENT,) * len(row),
                loss_mask=(False,) * len(row),
                logprobs=(0.0,) * len(row),
                versions=(-1,) * len(row),
                group="g",
                trajectory=str(i),
            )
            for i, row in enumerate(rows)
        ]
    )


def test_the_means_are_over_the_masked_tokens():
    kept = MASK.tolist()
    a = [float(x) for x, k in zip(ADVANTAGES, kept, strict=True) if k]
    p = [float(x) for x, k in zip(LOGPROBS, kept, strict=True) if k]
    expected = [(x - sum(a) / 4) * (y - sum(p) / 4) for x, y in zip(a, p, strict=True)]
    assert covariances(LOGPROBS, ADVANTAGES, MASK)[MASK].tolist() == pytest.approx(expected)


def test_random_ones_in_between_by_their_draws():
    covariance = torch.tensor([0.5, 2.0, 2.0, 3.0, 6.0])
    draws = torch.tensor([0, 7, 1, 3, 2])
    assert pick_between(MASK, covariance, 1, 1.0, 5.0, draws).tolist() == [False, False, False, True, False]
    assert pick_between(MASK, covariance, 1, 1.0, 5.0, -draws).tolist() == [False, True, False, False, False]
    assert pick_between(MASK, covariance, 1, 1.0, 5.0, 0 * draws).tolist() == [False, True, False, False, False]
    assert pick_between(MASK, covariance, 9, 1.0, 5.0, draws).tolist() == [False, True, False, True, False]
    assert not pick_between(MASK, covariance, 9, 7.0, 8.0, draws).any()


def test_the_largest_among_the_masked():
    covariance, draws = torch.tensor([0.5, 2.0, 99.0, 3.0, -6.0]), torch.tensor([4, 3, 2, 1, 0])
    assert pick_largest(MASK, covariance, 2, draws).tolist() == [False, True, False, True, False]
    assert not pick_largest(torch.zeros_like(MASK), covariance, 2, draws).any()
    assert pick_largest(MASK, torch.ones(5), 2, draws).tolist() == [False, False, False, True, True]


def numbers_of_splitmix(seed: int, count: int) -> list[int]:
    """In Python's integers, as published."""
    out = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_draws_are_of_a_samples_own_tokens_and_places():
    found = _mixed(torch.tensor([0, 7, -1])).tolist()
    assert [x % 2**64 for x in found] == [numbers_of_splitmix(seed % 2**64, 1)[0] for seed in (0, 7, -1)]
    rows = rollout_of([[1, 2, 3], [3, 2, 1], [1, 2, 3], [2, 2, 2, 2]])
    draws = rows.ragged(draws_of(rows))
    assert draws[0] == draws[2] and len({x for row in draws for x in row}) == 3 + 3 + 4
    order = [3, 1, 0, 2]
    assert rows.select(order).ragged(draws_of(rows.select(order))) == [draws[i] for i in order]

    many = rollout_of([[i, 9] for i in range(4000)])
    shares = (draws_of(many).double() / 2.0**64 + 0.5).histc(8, 0, 1) / many.num_tokens
    assert shares.tolist() == pytest.approx([1 / 8] * 8, abs=0.02)


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
