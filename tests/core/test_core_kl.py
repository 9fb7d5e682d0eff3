from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.core.kl import KL_ESTIMATORS, adapted_kl_coef, k1, k2, k3, low_var

P = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
Q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
KL = float((P * (P / Q).log()).sum())


@settings(max_examples=60, deadline=None)
@given(st.floats(-15, 0), st.floats(-15, 0))
def test_each_estimator_is_its_formula(logprob, ref):
    p, q = math.exp(logprob), math.exp(ref)
    expected = {"k1": math.log(p / q), "k2": math.log(p / q) ** 2 / 2, "k3": q / p - 1 - math.log(q / p)}
    expected |= {"low_var": min(expected["k3"], 10.0), "abs": abs(expected["k1"])}
    for name, estimator in KL_ESTIMATORS.items():
        pair = torch.tensor([logprob, ref], dtype=torch.float64)
        assert float(estimator(pair[0], pair[1])) == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    assert float((P * k1(P.log(), Q.log())).sum()) == pytest.approx(KL)
    assert float((P * k3(P.log(), Q.log())).sum()) == pytest.approx(KL)
    assert float((P * k2(P.log(), Q.log())).sum()) != pytest.approx(KL, rel=0.1)


def test_the_gradient_of_k2_on_samples_is_the_gradient_of_the_kl():
    logits = P.log().clone().requires_grad_(True)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - Q.log())).sum(), logits, retain_graph=True)
    (sampled,) = torch.autograd.grad((P * k2(logp, Q.log())).sum(), logits)
    torch.testing.assert_close(sampled, exact)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("pair", [(-300.0, -1.0), (-1.0, -300.0)])
def test_far_tokens_stay_finite_in_float32(name, pair):
    logprob = torch.tensor(pair[0], requires_grad=True)
    value = KL_ESTIMATORS[name](logprob, torch.tensor(pair[1]))
    value.backward()
    assert math.isfinite(float(value.detach())) and math.isfinite(float(logprob.grad))


@pytest.mark.parametrize("distance", [-45.0, -25.0, 25.0, 45.0])
@pytest.mark.parametrize("ratio", [None, 0.5])
def test_k3_pulls_the_harder_the_farther_the_policy_is(distance, ratio):
    """As slime's k3, value and gradient: exp(r) - 1 - r of r = log q - log p, however far."""
    logprob = torch.tensor(-50.0, requires_grad=True)
    value = k3(logprob, torch.tensor(-50.0 + distance), None if ratio is None else torch.tensor(ratio))
    value.backward()
    weight = 1.0 if ratio is None else ratio
    assert float(value.detach()) == pytest.approx(weight * (math.exp(distance) - 1 - distance), rel=1e-5)
    assert float(logprob.grad) == pytest.approx(weight * (1 - math.exp(distance)), rel=1e-5)


def test_a_small_weight_brings_low_var_back_within_its_bounds():
    value = low_var(torch.tensor(-25.0), torch.tensor(0.0), torch.tensor(1e-11))
    assert float(value) == pytest.approx(1e-11 * (math.exp(25) - 26), rel=1e-4)


def test_k3_keeps_its_digits_close_to_zero():
    value = k3(torch.tensor(-1.0), torch.tensor(-1.0 + 2**-10))
    x = 2.0**-10
    assert float(value) == pytest.approx(math.expm1(x) - x, rel=2e-4)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_the_unbiased_form_is_weighed_by_the_ratio_and_its_gradient(name):
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old, ref = torch.tensor([-1.2, -1.9]).double(), torch.tensor([-0.7, -2.5]).double()
    ratio = (logprobs - old).exp()
    found = KL_ESTIMATORS[name](logprobs, ref, ratio)
    plain = KL_ESTIMATORS[name](logprobs, ref)
    torch.testing.assert_close(found, ratio * plain)
    (slope,) = torch.autograd.grad(found.sum(), logprobs, retain_graph=True)
    (plain_slope,) = torch.autograd.grad(plain.sum(), logprobs)
    torch.testing.assert_close(slope, (ratio * (plain + plain_slope)).detach())


def test_the_gradient_of_the_unbiased_k3_is_the_gradient_of_the_kl():
    """Over tokens of an older policy, exactly: sum over the vocabulary instead of samples."""
    old = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    logits = P.log().clone().requires_grad_(True)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - Q.log())).sum(), logits, retain_graph=True)
    ratio = (logp - old.log()).exp()
    (sampled,) = torch.autograd.grad((old * k3(logp, Q.log(), ratio)).sum(), logits)
    torch.testing.assert_close(sampled, exact)


def test_low_var_is_held_within_10():
    far = low_var(torch.tensor(-8.0), torch.tensor(-1.0))
    assert float(far) == 10.0
    assert float(low_var(torch.tensor(-1.0), torch.tensor(-1.5))) == pytest.approx(math.exp(-0.5) - 0.5)


@pytest.mark.parametrize(("kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (5.0, 1.02), (0.0, 0.98)])
def test_the_coefficient_adapts_by_a_fifth_at_most(kl, factor):
    assert adapted_kl_coef(0.2, kl, 100, target=0.1, horizon=1000) == pytest.approx(0.2 * factor)
