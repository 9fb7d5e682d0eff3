import pytest
import torch

from whet.core.distill import distilled
from whet.reward.published.dapo import overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (18, -1.5)]
)
def test_the_penalty_grows_over_the_buffer(length, penalty):
    assert overlong_penalty(length, max_length=16, buffer=4) == penalty
    assert overlong_penalty(length, max_length=16, buffer=4, factor=0.5) == penalty / 2


def test_a_buffer_of_nothing_is_refused():
    with pytest.raises(ValueError, match="must be positive, not 0"):
        overlong_penalty(3, max_length=16, buffer=0)


def test_distillation_pulls_to_where_the_teacher_puts_more():
    found = distilled(torch.tensor([1.0, 1.0]), torch.tensor([-2.0, -1.0]), torch.tensor([-1.0, -3.0]), 0.5)
    assert found.tolist() == [1.5, 0.0]
