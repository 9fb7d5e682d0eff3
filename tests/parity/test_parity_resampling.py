import statistics

import pytest

from tests.parity.resampling import majority, sample_statistics
from whet.evaluate.passk import pass_at_k


def test_one_sample_has_a_mean_alone():
    assert sample_statistics([0.5]) == {"mean@1": 0.5}


def test_mean_and_spread_of_the_samples():
    found = sample_statistics([0.0, 1.0, 1.0])
    assert found["mean@3"] == pytest.approx(2 / 3) and found["std@3"] == pytest.approx(statistics.pstdev([0, 1, 1]))
    assert {key.split("/")[0] for key in found} == {"mean@3", "std@3", "best@2", "worst@2", "best@3", "worst@3"}


def test_the_best_of_k_comes_near_its_expectation():
    """With replacement: 1 - (share of wrong samples)^k."""
    found = sample_statistics([0.0, 0.0, 0.0, 1.0], num_draws=20_000)
    assert found["best@2/mean"] == pytest.approx(1 - 0.75**2, abs=0.01)
    assert found["worst@2/mean"] == pytest.approx(0.25**2, abs=0.01)
    assert found["best@2/mean"] < pass_at_k(4, 1, 2)


def test_the_majority_is_scored_by_its_first_sample():
    assert majority(["a", "b", "b"], [4, 7, 9]) == 7
    assert majority(["b", "a", "a", "b"], [3, 1, 2, 0]) == 3
    found = sample_statistics([1.0, 1.0, 1.0, 0.0], ["x", "x", "x", "y"], num_draws=4000)
    assert found["maj@4/mean"] > found["mean@4"]


def test_the_same_seed_draws_the_same():
    scores = [0.1, 0.5, 0.9, 0.3]
    assert sample_statistics(scores) == sample_statistics(scores) != sample_statistics(scores, seed=1)
