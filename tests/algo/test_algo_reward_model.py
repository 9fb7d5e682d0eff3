"""The reward model's loss against a few lines of float64."""

import math

import pytest
import torch

from whet.algo.preference_config import RewardModelConfig
from whet.algo.reward_model import reward_model_loss
from whet.core.batch import TokenOutputs
from whet.core.preference import pair_batch
from whet.observe.metrics import flatten
from whet.types import UNSAMPLED, Origin, Pair, Sample


def sample(num):
    mask = (False,) + (True,) * (num - 1)
    return Sample((1,) * num, (Origin.PROMPT,) * num, mask, (0.0,) * num, (UNSAMPLED,) * num, group="g", trajectory="t")


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_only_the_scores_at_last_tokens_count(center):
    batch = pair_batch([Pair(sample(3), sample(2), 0.5), Pair(sample(4), sample(3))])
    scores = torch.arange(batch.num_tokens, dtype=torch.float64).sin().requires_grad_()
    found = reward_model_loss(RewardModelConfig(center_coef=center))(batch, TokenOutputs(scores, scores, scores=scores))
    value = (batch.weights * found.terms).sum()
    value.backward()
    pairs = [(math.sin(2), math.sin(4), 0.5), (math.sin(8), math.sin(11), 0.0)]
    expected = sum(math.log1p(math.exp(-(c - r - m))) + center * (c + r) ** 2 for c, r, m in pairs) / 2
    assert float(value.detach()) == pytest.approx(expected, rel=1e-7)
    assert scores.grad.nonzero().flatten().tolist() == [2, 4, 8, 11]
    c, r, m = pairs[0]
    slope = -1 / (1 + math.exp(c - r - m)) + 2 * center * (c + r)
    assert float(scores.grad[2]) == pytest.approx(slope / 2, rel=1e-6)
    values = flatten(found.metrics)
    assert values["rm/accuracy"] == 1.0 and values["rm/margin"] == pytest.approx(sum(c - r for c, r, _ in pairs) / 2)
