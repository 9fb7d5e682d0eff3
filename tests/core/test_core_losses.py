from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from whet.core.losses import (
    MAX_EXPONENT,
    cispo,
    clipped_surrogate,
    clipped_terms,
    geometric_mean,
    reinforce,
    sapo,
    sequence_log_ratio,
    sequence_mask,
    value_loss,
)


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
    assert float(logprobs.grad[1]) == pytest.approx(math.exp(MAX_EXPONENT), rel=1e-4)


def test_a_far_sample_has_a_finite_geometric_mean():
    b = batch(sample(".##"))
    logprobs = torch.zeros(3, requires_grad=True)
    found = geometric_mean(b, logprobs, torch.full((3,), -200.0), torch.full((3,), -1.0), 0.4, 0.4)
    found.terms.sum().backward()
    assert bool(found.terms.isfinite().all()) and bool(logprobs.grad.isfinite().all())


@pytest.mark.parametrize("distance", [-30.0, 30.0])
def test_the_ratio_of_a_far_token_has_its_gradient(distance):
    """slime's loss: nothing but the clip stops a token, and the clip does not stop one that moved the wrong way."""
    logprobs = torch.tensor([distance], requires_grad=True)
    found = clipped_surrogate(logprobs, torch.tensor([0.0]), torch.tensor([-distance]), 0.2, 0.2)
    found.terms.sum().backward()
    assert float(logprobs.grad) == pytest.approx(distance * math.exp(distance), rel=1e-5, abs=0)
    dual = clipped_surrogate(logprobs, torch.tensor([0.0]), torch.tensor([-abs(distance)]), 0.2, 0.2, 3.0)
    assert float(dual.terms.detach()) == pytest.approx((3.0 if distance > 0 else 0.8) * 30)


LOG = st.floats(-4, 0)
ROWS = st.lists(st.tuples(LOG, LOG, st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3), st.booleans()), min_size=1, max_size=5)
SAMPLES = st.lists(ROWS, min_size=1, max_size=4)


def columns_of(samples):
    """A batch, and log-probs, old log-probs and advantages in float64."""
    b = batch(*(sample("." + "".join("#" if row[3] else "." for row in rows), trajectory=str(i)) for i, rows in enumerate(samples)))
    flat = [[(0.0, 0.0, 0.0, False), *rows] for rows in samples]
    logprobs, old, advantages = (
        torch.tensor([row[k] for rows in flat for row in rows], dtype=torch.float64) for k in range(3)
    )
    return b, logprobs.requires_grad_(True), old, advantages


def slopes(value, logprobs):
    return torch.autograd.grad(value, logprobs, allow_unused=True, materialize_grads=True)[0]


def plain_terms(name, samples, logprobs, old, advantages):
    """Each loss as a sum over samples of plain expressions, differentiated by autograd; 0 outside of the mask."""
    total, start = 0 * logprobs.sum(), 0
    for rows in samples:
        places = [start + 1 + i for i, row in enumerate(rows) if row[3]]
        start += 1 + len(rows)
        if not places:
            continue
        x, y, a = logprobs[places], old[places], advantages[places]
        d = x - y
        if name == "cispo":
            total = total - (d.exp().clamp(0.5, 1.5).detach() * a * x).sum()
        elif name == "sapo":
            tau = torch.tensor([1.0 if x > 0 else 1.05 for x in a.tolist()], dtype=torch.float64)
            total = total - (4 / tau / (1 + (-tau * (d.exp() - 1)).exp()) * a).sum()
        elif name == "reinforce":
            total = total - (a * x).sum()
        elif name == "sequence":
            ratio = d.mean().exp()
            total = total + torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a).sum()
        elif name == "token":
            ratio = d.mean().detach().exp() * (x - x.detach()).exp()
            total = total + torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a).sum()
        else:
            held = torch.where(a > 0, d.clamp(max=0.3), d.clamp(min=-0.3))
            total = total - len(places) * a.mean() * held.mean().exp()
    return total


def whet_terms(name, b, logprobs, old, advantages):
    if name == "cispo":
        return cispo(logprobs, old, advantages, 0.5, 0.5).terms
    if name == "sapo":
        return sapo(logprobs, old, advantages).terms
    if name == "reinforce":
        return reinforce(logprobs, old, advantages).terms
    if name == "geometric":
        return geometric_mean(b, logprobs, old, advantages, 0.3, 0.3).terms
    return clipped_terms(sequence_log_ratio(b, logprobs, old, name), advantages, 0.2, 0.2).terms


LOSSES = ["cispo", "sapo", "reinforce", "sequence", "token", "geometric"]


@pytest.mark.parametrize("name", LOSSES)
@given(samples=SAMPLES)
def test_value_and_gradient_are_those_of_the_plain_formula(name, samples):
    b, logprobs, old, advantages = columns_of(samples)
    value = (whet_terms(name, b, logprobs, old, advantages) * b.loss_mask).sum()
    expected = plain_terms(name, samples, logprobs, old, advantages)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(slopes(value, logprobs), slopes(expected, logprobs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@given(samples=SAMPLES, seed=st.integers(0, 99))
def test_no_order_and_no_cut_of_the_samples_changes_a_gradient(name, samples, seed):
    b, logprobs, old, advantages = columns_of(samples)
    whole = slopes((whet_terms(name, b, logprobs, old, advantages) * b.loss_mask).sum(), logprobs)
    order = torch.randperm(b.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    cut = len(order) // 2
    for part in (order[:cut], order[cut:]):
        if not part:
            continue
        places = torch.cat([torch.arange(b.starts[i], b.starts[i] + b.lengths[i]) for i in part])
        piece = b.select(part)
        terms = whet_terms(name, piece, logprobs[places], old[places], advantages[places])
        found = slopes((terms * piece.loss_mask).sum(), logprobs)
        torch.testing.assert_close(found[places], whole[places], rtol=1e-12, atol=1e-12)


def test_the_two_gradients_of_a_sequence_agree_where_its_advantage_is_one():
    b = batch(sample(".##.#"))
    logprobs = torch.tensor([0.0, -1.0, -0.5, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    old, advantages = logprobs.detach() - 0.05, torch.full((5,), 0.7, dtype=torch.float64)
    found = [
        slopes((clipped_terms(sequence_log_ratio(b, logprobs, old, form), advantages, 0.2, 0.2).terms * b.loss_mask).sum(), logprobs)
        for form in ("token", "sequence")
    ]
    torch.testing.assert_close(*found)


def test_the_dual_clip_is_told_apart():
    logprobs, old = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -0.5, -1.0])
    found = clipped_surrogate(logprobs, old, torch.tensor([-1.0, -1.0, -1.0]), 0.2, 0.2, 3.0)
    assert found.clipped.tolist() == [True, True, False] and found.dual.tolist() == [True, False, False]


def test_sequences_that_drifted_lose_their_negative_tokens():
    b = batch(sample(".##"), sample(".##", trajectory="u"))
    old = torch.zeros(6)
    logprobs = torch.tensor([0.0, -0.3, -0.1, 0.0, -0.05, -0.05])
    keep = sequence_mask(b, logprobs, old, torch.tensor([0.0, -1.0, 1.0, 0.0, -1.0, -1.0]), delta=0.1)
    assert keep.tolist() == [True, False, True, True, True, True]


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.floats(0.05, 1))
def test_the_value_loss_is_the_larger_of_two_errors(predicted, old, target, clip):
    v = torch.tensor([predicted], dtype=torch.float64, requires_grad=True)
    found = value_loss(v, torch.tensor([old]).double(), torch.tensor([target]).double(), clip)
    held = old + max(-clip, min(clip, predicted - old))
    assert float(found.terms.detach()) == pytest.approx(max((predicted - target) ** 2, (held - target) ** 2), abs=1e-5)
    assert bool(found.moved) == (abs(predicted - old) > clip) or abs(abs(predicted - old) - clip) < 1e-6
    plain = value_loss(v, torch.zeros(1), torch.tensor([target]).double())
    assert float(plain.terms.detach()) == pytest.approx((predicted - target) ** 2, abs=1e-5) and not bool(plain.clipped)
    if bool(found.clipped):
        assert float(slopes(found.terms.sum(), v)) == 0.0
