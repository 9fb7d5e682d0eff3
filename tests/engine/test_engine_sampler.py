from __future__ import annotations

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.engine.embedded import sampler
from whet.engine.embedded.sampler import nucleus, sample, uniforms
from whet.types import SamplingParams

BASE = SamplingParams(max_tokens=1)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
both_ways = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])


def expected_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, then the smallest top-p set, then min-p, in plain Python floats."""
    top = max(logits)
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: params.top_k or None]
    total = sum(weights[i] for i in order)
    kept: list[int] = []
    while order and (params.top_p == 1 or sum(weights[i] for i in kept) / total < params.top_p):
        kept.append(order.pop(0))
    kept = [i for i in kept if weights[i] >= params.min_p]
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


@both_ways
@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.integers(-80, 80).map(lambda n: n / 10), min_size=2, max_size=12, unique=True),
    temperature=st.floats(0.3, 3),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.31, 0.57, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.021, 0.33, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_logprob_is_of_the_distribution_sampled_from(compiled, logits, temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(1, temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    dtype, tolerance = (torch.float32, 1e-5) if compiled else (torch.float64, 1e-9)
    tokens, logprobs, _ = sample(torch.tensor([logits], dtype=dtype), [params], [5], compiled=compiled)
    expected = expected_distribution(logits, params)
    assert expected[tokens[0]] > 0
    assert logprobs[0] == pytest.approx(math.log(expected[tokens[0]]), abs=tolerance)


@both_ways
@pytest.mark.parametrize(
    "params",
    [BASE, replace(BASE, temperature=0.6), replace(BASE, top_k=4), replace(BASE, temperature=1.4, top_p=0.75), replace(BASE, min_p=0.3)],
)
def test_frequencies_follow_the_distribution(params, compiled):
    logits = [0.3, -1.2, 2.0, 0.9, -0.4, 1.1, -2.5, 0.0]
    draws = 20_000
    rows = torch.tensor([logits], dtype=torch.float32 if compiled else torch.float64).repeat(draws, 1)
    tokens, *_ = sample(rows, [replace(params, seed=s) for s in range(draws)], [17] * draws, compiled=compiled)
    counts = np.bincount(tokens, minlength=len(logits))
    expected = np.array(expected_distribution(logits, params)) * draws
    assert not counts[expected == 0].any()
    used = expected > 0
    chi_square = (((counts - expected) ** 2)[used] / expected[used]).sum()
    assert chi_square < 26.1  # the 0.9995 quantile at 8 - 1 degrees of freedom; fewer have a lower one


def test_positions_of_one_seed_are_independent_draws():
    draws = 20_000
    noise = uniforms([12345] * draws, range(draws))
    counts, _ = np.histogram(noise, bins=20, range=(0, 1))
    assert ((counts - draws / 20) ** 2 / (draws / 20)).sum() < 45.0  # 0.9993 quantile at 19 degrees of freedom
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03
    neighbours = uniforms(range(draws), [3] * draws)
    assert abs(np.corrcoef(noise, neighbours)[0, 1]) < 0.03
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.03


def test_noise_is_a_function_of_seed_and_position_alone():
    many = uniforms([1, 2, 2**63 - 1, 1], [0, 5, 9, 1])
    for i, (seed, position) in enumerate([(1, 0), (2, 5), (2**63 - 1, 9), (1, 1)]):
        assert uniforms([seed], [position])[0] == many[i]
    assert len(set(many)) == 4
    assert ((many >= 0) & (many < 1)).all()


@both_ways
@pytest.mark.parametrize("vocab", [50, 3001])
def test_a_row_is_drawn_alike_in_any_batch(vocab, compiled):
    torch.manual_seed(0)
    logits = torch.randn(7, vocab)
    params = [
        BASE,
        replace(BASE, temperature=0.0),
        replace(BASE, top_p=0.5),
        replace(BASE, top_k=3),
        replace(BASE, min_p=0.2),
        replace(BASE, temperature=0.7),
        BASE,
    ]
    params = [replace(p, seed=i) for i, p in enumerate(params)]
    tokens, logprobs, _ = sample(logits, params, [9] * 7, compiled=compiled)
    for i in range(7):
        assert sample(logits[i : i + 1], [params[i]], [9], compiled=compiled) == ([tokens[i]], [logprobs[i]], [b""])  # to the bit


@needs_compiler
@pytest.mark.parametrize("vocab", [1, 15, 16, 100, 4096, 5003])
def test_compiled_draws_are_inversions_of_the_cumulative_sum(vocab):
    """In float64, token by token: where the point is not next to a step of the sum, the same token."""
    rng = np.random.default_rng(vocab)
    draws = 200
    logits = torch.from_numpy(rng.normal(0, 3, (draws, vocab))).float()
    logits[rng.random((draws, vocab)) < 0.1] = -torch.inf
    logits[:, vocab // 2] = 0.5
    params = [replace(BASE, temperature=float(rng.uniform(0.4, 2)), seed=i) for i in range(draws)]
    tokens, logprobs, _ = sample(logits, params, [3] * draws, compiled=True)
    noise, same = uniforms(range(draws), [3] * draws), 0
    for row, token, logprob, p, point in zip(logits.double(), tokens, logprobs, params, noise, strict=True):
        chances = torch.softmax(row / p.temperature, 0)
        sums = chances.cumsum(0)
        assert logprob == pytest.approx(math.log(chances[token]), abs=1e-5)
        assert sums[token] >= point - 1e-6 and sums[token] - chances[token] <= point + 1e-6
        same += token == int(torch.searchsorted(sums, torch.tensor(point), right=True))
    assert same >= draws - 2


@settings(max_examples=200, deadline=None)
@given(
    levels=st.lists(st.integers(-12, 4), min_size=10, max_size=60),
    top_k=st.sampled_from([0, 1, 3, 5, 9, 30, 100]),
    top_p=st.sampled_from([0.1037, 0.5091, 0.9013, 0.99907, 1.0]),
    min_p=st.sampled_from([0.0, 0.0103, 0.3, 1.0]),
)
def test_what_is_left_is_the_same_however_few_tokens_are_looked_at_first(levels, top_k, top_p, min_p):
    """Many tokens are equally likely: which of them are left depends on their ids alone."""
    logprobs = torch.tensor([levels, levels[::-1]], dtype=torch.float64).log_softmax(-1)
    params = [replace(BASE, top_k=top_k, top_p=top_p, min_p=min_p), replace(BASE, top_p=0.7019)]
    expected = [expected_distribution(row, p) for row, p in zip((levels, levels[::-1]), params, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "CANDIDATES", 4)
        found = nucleus(logprobs, params)
        assert torch.equal(nucleus(logprobs[1:], params[1:])[0], found[1])
    whole = nucleus(logprobs, params)
    assert torch.equal(found.isfinite(), whole.isfinite()) and torch.allclose(found.exp(), whole.exp(), atol=1e-12)
    assert found.exp().tolist() == [pytest.approx(e, abs=1e-9) for e in expected]


@pytest.mark.parametrize(("top_p", "size"), [(0.1, 1), (0.5, 1), (0.501, 2), (0.75, 2), (0.76, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, size):
    chances = torch.tensor([[0.125, 0.5, 0.125, 0.25]], dtype=torch.float64)
    kept = nucleus(chances.log(), [replace(BASE, top_p=top_p)])[0]
    order = [1, 3, 0, 2]  # the two equals: the lower id comes first
    assert kept.isfinite().nonzero().flatten().tolist() == sorted(order[:size])
    assert kept.exp().sum().item() == pytest.approx(1.0, abs=1e-12)


def test_ties_at_the_limit_leave_exactly_top_k_tokens():
    kept = nucleus(torch.zeros(2, 6, dtype=torch.float64).log_softmax(-1), [replace(BASE, top_k=2), replace(BASE, top_k=6, top_p=0.5)])
    assert kept[0].exp().tolist() == pytest.approx([0.5, 0.5, 0, 0, 0, 0])
    assert kept[1].exp().tolist() == pytest.approx([1 / 3] * 3 + [0] * 3)


def test_greedy_takes_the_lowest_id_of_equals_and_is_certain():
    assert sample(torch.tensor([[1.0, 3.0, 3.0, 0.0]]), [replace(BASE, temperature=0.0)], [0]) == ([1], [0.0], [b""])


@both_ways
@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
def test_no_token_without_probability_is_drawn(monkeypatch, draw, compiled):
    monkeypatch.setattr("whet.engine.embedded.sampler.uniforms", lambda seeds, positions: np.full(len(seeds), draw))
    rows = torch.full((2, 9), -torch.inf)
    rows[0, 3], rows[0, 5] = 0.0, 1.0
    rows[1] = -3000.0  # so far below the others that its probability is 0 in float64
    rows[1, 3], rows[1, 5] = 0.0, 1.0
    tokens, logprobs, _ = sample(rows, [BASE, BASE], [0, 0], compiled=compiled)
    assert set(tokens) <= {3, 5}
    assert all(math.isfinite(x) for x in logprobs)


@both_ways
def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow(compiled):
    tokens, logprobs, _ = sample(torch.tensor([[80.0, 90.0, -90.0]]), [replace(BASE, temperature=1e-37)], [0], compiled=compiled)
    assert (tokens, logprobs) == ([1], [0.0])


@both_ways
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [BASE, replace(BASE, temperature=0.0), replace(BASE, top_k=2)])
def test_logits_that_are_not_finite_are_an_error(bad, params, compiled):
    with pytest.raises(ValueError, match="not finite"):
        sample(torch.tensor([[0.0, bad, 1.0]]), [params], [0], compiled=compiled)


def test_bfloat16_logits_are_sampled_in_float32():
    logits = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.bfloat16)
    tokens, logprobs, _ = sample(logits, [BASE], [4])
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits.float(), -1)[0, tokens[0]].item(), abs=1e-7)
