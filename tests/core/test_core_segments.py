from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from whet.core.segments import chains_of, per_sample_count, per_sample_max, per_sample_mean, per_sample_sum, reverse_scan

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@given(LENGTHS, st.integers(0, 10_000))
def test_the_scan_is_the_recursion_from_the_back(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    terms, decay = torch.randn(2, total, generator=generator, dtype=torch.float64)
    expected, start = [], 0
    for length in lengths:
        running, row = 0.0, []
        for t in reversed(range(start, start + length)):
            running = float(terms[t]) + float(decay[t]) * running
            row.append(running)
        expected += row[::-1]
        start += length
    found = reverse_scan(terms, decay, torch.tensor(lengths))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_chains_follow_the_order_of_a_trajectorys_samples():
    b = batch(
        sample(".##", trajectory="a", order=1),
        sample(".#", trajectory="b"),
        sample(".#.", trajectory="a", order=0),
    )
    chains = chains_of(b)
    assert chains.index.tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
    assert chains.lengths.tolist() == [6, 2] and chains.starts.tolist() == [0, 6]
    column = torch.arange(8.0)
    assert torch.equal(chains.put_back(column[chains.index]), column)


def test_pools_over_trained_tokens_of_each_sample():
    b = batch(sample(".##."), sample("..", trajectory="u"), sample(".#", trajectory="v"))
    column = torch.tensor([9.0, -1.0, -3.0, 9.0, 9.0, 9.0, 9.0, -5.0], requires_grad=True)
    assert per_sample_sum(b, column).tolist() == [-4.0, 0.0, -5.0]
    assert per_sample_count(b).tolist() == [2, 0, 1]
    assert per_sample_max(b, column).tolist() == [-1.0, 0.0, -5.0]
    mean = per_sample_mean(b, column)
    assert mean.tolist() == [-2.0, 0.0, -5.0]
    mean.sum().backward()
    assert column.grad.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, 1.0]


def test_a_nan_outside_of_the_mask_stays_outside():
    b = batch(sample(".#."))
    assert per_sample_sum(b, torch.tensor([torch.nan, 2.0, torch.inf])).tolist() == [2.0]
