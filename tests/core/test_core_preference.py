"""Losses of preference pairs against a few lines of float64, and what keeps pairs together."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.algo.dpo import dpo_loss
from whet.algo.preference_config import DpoConfig
from whet.core.batch import TokenOutputs
from whet.core.preference import ipo_loss, pair_batch, pair_mean, sigmoid_loss, split_pairs
from whet.observe.metrics import flatten
from whet.types import UNSAMPLED, Origin, Pair, Sample

NUMBERS = st.floats(-30, 30)


def sample(num_prompt: int, num_reply: int, name: str) -> Sample:
    num = num_prompt + num_reply
    mask = (False,) * num_prompt + (True,) * num_reply
    return Sample((1,) * num, (Origin.PROMPT,) * num, mask, (0.0,) * num, (UNSAMPLED,) * num, group=name, trajectory=name)


def pairs() -> list[Pair]:
    sizes = [(2, 5, 0.0), (4, 1, 0.5), (3, 3, 2.0)]
    return [Pair(sample(3, c, f"{i}c"), sample(3, r, f"{i}r"), margin) for i, (c, r, margin) in enumerate(sizes)]


@given(z=NUMBERS, m=st.floats(0, 5), s=st.floats(0, 0.49))
def test_the_sigmoid_loss_is_a_cross_entropy(z, m, s):
    p = 1 / (1 + math.exp(m - z)) if z > m else math.exp(z - m) / (1 + math.exp(z - m))
    if not 1e-6 < p < 1 - 1e-6:
        return
    expected = -(1 - s) * math.log(p) - s * math.log(1 - p)
    found = sigmoid_loss(torch.tensor([z], dtype=torch.float64), torch.tensor([m], dtype=torch.float64), s)
    assert float(found) == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_far_ahead_and_far_behind_are_finite():
    far = sigmoid_loss(torch.tensor([1e4, -1e4]), torch.zeros(2))
    assert far.tolist() == [0.0, 1e4]


@given(h=NUMBERS, beta=st.floats(0.01, 5))
def test_ipo_is_a_square(h, beta):
    assert float(ipo_loss(torch.tensor([h], dtype=torch.float64), beta)) == pytest.approx((h - 0.5 / beta) ** 2)


def reference_terms(config: DpoConfig, found: list[Pair], logprobs: list[list[float]], ref: list[list[float]]) -> list[float]:
    """The loss of each pair, token by token in Python's own floats."""
    terms = []
    for i, pair in enumerate(found):
        ratios = []
        for side, one in ((0, pair.chosen), (1, pair.rejected)):
            total = sum(a - b for a, b, m in zip(logprobs[2 * i + side], ref[2 * i + side], one.loss_mask, strict=True) if m)
            ratios.append(total / sum(one.loss_mask) if config.means else total)
        h = ratios[0] - ratios[1]
        if config.loss == "ipo":
            term = (h - 1 / (2 * config.beta)) ** 2
        else:
            s, z = config.label_smoothing, config.beta * h - pair.margin
            term = (1 - s) * math.log1p(math.exp(-z)) + s * math.log1p(math.exp(z))
        mask = pair.chosen.loss_mask
        nll = -sum(x for x, m in zip(logprobs[2 * i], mask, strict=True) if m) / sum(mask)
        terms.append(term + config.sft_coef * nll)
    return terms


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.7, "label_smoothing": 0.2},
        {"loss": "ipo", "beta": 0.3},
        {"loss": "ipo", "beta": 0.3, "length_normalize": False},
        {"beta": 2.0, "length_normalize": True, "sft_coef": 0.6},
    ],
)
def test_the_loss_and_its_gradient_are_those_of_the_formula(options):
    config, batch = DpoConfig(**options), pair_batch(pairs())
    generator = torch.Generator().manual_seed(3)
    logprobs, ref = (-3 * torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64) for _ in range(2))
    logprobs.requires_grad_()
    batch = batch.with_(ref_logprobs=ref)
    found = dpo_loss(config)(batch, TokenOutputs(logprobs, torch.zeros_like(logprobs)))
    value = (batch.weights * found.terms).sum()
    value.backward()
    expected = reference_terms(config, pairs(), batch.ragged(logprobs.detach()), batch.ragged(ref))
    assert float(value.detach()) == pytest.approx(sum(expected) / 3, rel=1e-6)
    for place in (3, 4, 9, 20):  # differences of the same formula
        moved = []
        for sign in (1, -1):
            bent = logprobs.detach().clone()
            bent[place] += sign * 1e-5
            moved.append(sum(reference_terms(config, pairs(), batch.ragged(bent), batch.ragged(ref))) / 3)
        assert float(logprobs.grad[place]) == pytest.approx((moved[0] - moved[1]) / 2e-5, rel=1e-4, abs=1e-9)
    assert not logprobs.grad[~batch.loss_mask].any()


def test_the_metrics_say_who_is_ahead():
    batch = pair_batch(pairs())
    logprobs = torch.zeros(batch.num_tokens)
    logprobs[3], logprobs[13 + 3] = 2.0, -1.0  # first tokens of the first and second chosen reply
    found = dpo_loss(DpoConfig(beta=0.5))(batch.with_(ref_logprobs=torch.zeros(batch.num_tokens)), TokenOutputs(logprobs, logprobs))
    values = flatten(found.metrics)
    assert values["dpo/accuracy"] == pytest.approx(1 / 3)
    assert values["dpo/margin"] == pytest.approx(0.5 * (2 - 1) / 3) == pytest.approx(values["dpo/chosen_reward"])
    assert values["dpo/rejected_reward"] == 0


def test_ipo_has_no_label_smoothing():
    with pytest.raises(ValueError, match=r"label_smoothing is 0\.1, which ipo does not have"):
        DpoConfig(loss="ipo", label_smoothing=0.1)


def test_weights_are_one_over_the_pairs_of_the_step_whatever_the_cut():
    batch = pair_batch(pairs())
    assert float(batch.weights.sum()) == pytest.approx(1)
    part = batch.select([2, 3])
    assert torch.equal(pair_mean(part, total=3), part.weights)


def test_a_pair_that_was_split_is_an_invariant_broken():
    with pytest.raises(AssertionError, match="a pair was split"):
        split_pairs(pair_batch(pairs()).select([0, 1, 2, 5]))
