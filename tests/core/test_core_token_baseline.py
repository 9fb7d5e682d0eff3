from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from whet.core.token_baseline import optimal_token_baseline
from whet.types import Origin, Sample

MASKS = st.lists(st.text(".#", min_size=1, max_size=5).map(lambda tail: ".#" + tail), min_size=1, max_size=4)


def trajectory(mask, name, group):
    plain = sample(mask, trajectory=name, group=group)
    origin = (Origin.PROMPT, *(Origin.MODEL if c == "#" else Origin.ENVIRONMENT for c in mask[1:]))
    return Sample(**{key: getattr(plain, key) for key in plain.__dataclass_fields__} | {"origin": origin})


def columns(b, seed):
    generator = torch.Generator().manual_seed(seed)
    returns, logprobs, squares = torch.rand(3, b.num_tokens, generator=generator, dtype=torch.float64)
    return returns, -3 * logprobs, squares


@given(st.lists(st.tuples(MASKS), min_size=1, max_size=2), st.sampled_from(["action", "position"]), st.booleans(), st.integers(0, 99))
def test_the_baseline_is_the_weighted_mean_of_the_groups_returns(groups, align, zero_tail, seed):
    rows = [(mask, f"{g}/{i}", str(g)) for g, (masks,) in enumerate(groups) for i, mask in enumerate(masks)]
    b = batch(*(trajectory(*row) for row in rows))
    returns, logprobs, squares = columns(b, seed)
    found = optimal_token_baseline(b.with_(squared_probs=squares), returns, logprobs, align=align, zero_tail=zero_tail, eps=0.0)
    steps: dict[tuple[str, int], list[tuple[int, float]]] = {}
    place_of = {}
    for (mask, _, group), start in zip(rows, b.starts.tolist(), strict=True):
        weight, rank = 0.0, 0
        for t in range(1, len(mask)):
            if mask[t] == "#":
                weight += 1 - 2 * math.exp(float(logprobs[start + t])) + float(squares[start + t])
                place_of[start + t] = (group, rank if align == "action" else t - 1)
                steps.setdefault(place_of[start + t], []).append((start + t, weight))
                rank += 1
    for (mask, name, group), start in zip(rows, b.starts.tolist(), strict=True):
        rivals = [m.count("#") for m, other, g in rows if g == group and other != name]
        for t in range(start + 1, start + len(mask)):
            if not b.loss_mask[t]:
                continue
            entries = steps[place_of[t]]
            bottom = sum(w for _, w in entries)
            expected = sum(float(returns[u]) * w for u, w in entries) / bottom if bottom else 0.0
            if not rivals or (zero_tail and mask.count("#") > max(rivals) and place_of[t][1] >= max(rivals)):
                expected = 0.0
            if abs(bottom) > 1e-3:
                assert float(found[t]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_correction_weights_enter_squared():
    b = batch(trajectory(".#", "a", "g"), trajectory(".#", "b", "g"))
    b = b.with_(squared_probs=torch.full((4,), 0.5), correction=torch.tensor([1.0, 2.0, 1.0, 1.0]))
    returns = torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = optimal_token_baseline(b, returns, torch.full((4,), math.log(0.25)))
    assert found[1].item() == pytest.approx(4 / 5) == found[3].item()


def test_without_squared_probs_it_says_so():
    b = batch(sample(".#"))
    with pytest.raises(ValueError, match="squared probabilities"):
        optimal_token_baseline(b, torch.zeros(2), torch.zeros(2))
