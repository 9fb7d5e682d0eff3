from __future__ import annotations

import math

import pytest

from whet.train.torch_native.config import OptimConfig
from whet.train.torch_native.optim import lr_at


def curve(total, **settings):
    return [lr_at(OptimConfig(lr=2.0, **settings), step, total) for step in range(total + 2)]


def test_constant_after_a_linear_warmup():
    assert curve(6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert curve(3) == [2.0] * 5


def test_linear_falls_to_the_floor_and_stays():
    assert curve(5, schedule="linear", warmup_steps=1, min_lr_ratio=0.2) == pytest.approx(
        [2.0, 2.0, 1.6, 1.2, 0.8, 0.4, 0.4]
    )


def test_cosine_is_half_a_period():
    expected = [2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8))) for step in range(9)]
    assert curve(8, schedule="cosine", min_lr_ratio=0.1) == pytest.approx([*expected, 0.2])
    assert curve(8, schedule="cosine")[4] == pytest.approx(1.0)


def test_a_warmup_longer_than_the_run_is_still_a_warmup():
    assert curve(2, schedule="cosine", warmup_steps=8)[:2] == pytest.approx([0.25, 0.5])


@pytest.mark.parametrize("bad", [{"lr": -1}, {"clip_grad": 0}, {"min_lr_ratio": 1.5}, {"eps": 0}, {"schedule": "step"}])
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        OptimConfig(**bad)
