from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whet.core.whiten import masked_mean, masked_var, whiten

COLUMNS = st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=2, max_size=12).filter(
    lambda rows: sum(kept for _, kept in rows) >= 2
)


@given(COLUMNS)
def test_statistics_are_those_of_the_masked_entries(rows):
    values = torch.tensor([v for v, _ in rows], dtype=torch.float64)
    mask = torch.tensor([k for _, k in rows])
    kept = [v for v, k in rows if k]
    assert float(masked_mean(values, mask)) == pytest.approx(statistics.fmean(kept), abs=1e-12)
    assert float(masked_var(values, mask)) == pytest.approx(statistics.variance(kept), abs=1e-9)
    assert float(masked_var(values, mask, unbiased=False)) == pytest.approx(statistics.pvariance(kept), abs=1e-9)


@given(COLUMNS.filter(lambda rows: statistics.pvariance([v for v, k in rows if k]) > 1e-2))
def test_whitened_entries_have_mean_0_and_std_1(rows):
    values = torch.tensor([v for v, _ in rows], dtype=torch.float64)
    mask = torch.tensor([k for _, k in rows])
    found = whiten(values, mask)[mask].tolist()
    assert statistics.fmean(found) == pytest.approx(0, abs=1e-9)
    assert statistics.stdev(found) == pytest.approx(1, rel=1e-5)
    shifted = whiten(values, mask, shift_mean=False)[mask].tolist()
    assert statistics.fmean(shifted) == pytest.approx(float(masked_mean(values, mask)), abs=1e-9)


def test_equal_values_and_single_ones_become_0():
    mask = torch.tensor([True, True, False])
    assert whiten(torch.tensor([2.0, 2.0, 3.0]), mask)[:2].tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([2.0, 7.0]), torch.tensor([True, False]))[0].item() == 0.0


def test_nothing_has_no_variance():
    with pytest.raises(ValueError, match="the mask is empty"):
        whiten(torch.ones(2), torch.zeros(2, dtype=torch.bool))
