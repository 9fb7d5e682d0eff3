from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from whet.core.losses import MAX_LOG_RATIO, clipped_surrogate


def reference(logprob, old, advantage, low, high, dual):
    """The term and its derivative by the log-prob, by cases."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        clipped = ratio > 1 + high
        return (-(1 + high) * advantage, 0.0) if clipped else (-ratio * advantage, -ratio * advantage)
    if ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    if dual is not None and ratio > dual:
        return -dual * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-6, 0),
    st.floats(-6, 0),
    st.floats(-3, 3),
    st.floats(0, 0.9),
    st.floats(0, 0.9),
    st.none() | st.floats(1.95, 5),
)
def test_term_gradient_and_flag_agree_with_the_cases(logprob, old, advantage, low, high, dual):
    ratio = math.exp(logprob - old)
    edges = [1 - low, 1 + high, *([dual] if dual is not None else [])]
    assume(all(abs(ratio - edge) > 1e-9 for edge in edges) and (advantage == 0 or abs(advantage) > 1e-9))
    x = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    old_, advantage_ = (torch.tensor([v], dtype=torch.float64) for v in (old, advantage))
    found = clipped_surrogate(x, old_, advantage_, low, high, dual)
    found.terms.sum().backward()
    term, slope = reference(logprob, old, advantage, low, high, dual)
    assert float(found.terms.detach()) == pytest.approx(term, rel=1e-9, abs=1e-12)
    assert float(x.grad) == pytest.approx(slope, rel=1e-9, abs=1e-12)
    assert float(found.ratio) == pytest.approx(ratio)
    assert not found.ratio.requires_grad
    if advantage != 0:
        assert bool(found.clipped) == (slope == 0.0)


def test_on_policy_the_gradient_is_minus_the_advantage_even_without_room_to_move():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -1.5])
    clipped_surrogate(logprobs, logprobs.detach(), advantages, 0.0, 0.0).terms.sum().backward()
    assert logprobs.grad.tolist() == [-0.5, 1.5]


def test_clip_higher_leaves_more_room_above():
    logprobs, old = torch.tensor([0.25]).log(), torch.tensor([0.2]).log()
    advantages = torch.tensor([1.0])
    symmetric = clipped_surrogate(logprobs, old, advantages, 0.2, 0.2)
    higher = clipped_surrogate(logprobs, old, advantages, 0.2, 0.28)
    assert (bool(symmetric.clipped), bool(higher.clipped)) == (True, False)
    assert float(symmetric.terms) == pytest.approx(-1.2)
    assert float(higher.terms) == pytest.approx(-1.25)


def test_far_tokens_stay_finite():
    logprobs = torch.tensor([-200.0, 0.0], requires_grad=True)
    old = torch.tensor([0.0, -200.0])
    found = clipped_surrogate(logprobs, old, torch.tensor([-1.0, -1.0]), 0.2, 0.2)
    found.terms.sum().backward()
    assert bool(found.terms.isfinite().all()) and bool(logprobs.grad.isfinite().all())
    assert float(found.ratio.max()) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
