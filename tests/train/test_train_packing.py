from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.train.torch_native.packing import pack

# Recorded from slime 624b824a, slime.utils.seqlen_balancing.first_fit_pack, max_tokens 64.
SLIME_FIRST_FIT = [
    (
        [59, 29, 53, 31, 7, 21, 37, 36, 30, 55, 58, 24, 35, 27, 42, 18],
        [[0], [1, 3], [2, 4], [5, 6], [7, 11], [8, 13], [9], [10], [12, 15], [14]],
    ),
    (
        [13, 41, 59, 56, 53, 9, 21, 12, 36, 53, 33, 35, 46, 29, 55, 18],
        [[0, 1, 5], [2], [3], [4], [6, 7, 13], [8, 15], [9], [10], [11], [12], [14]],
    ),
]


@pytest.mark.parametrize(("lengths", "rows"), SLIME_FIRST_FIT)
def test_first_fit_as_slime_packs(lengths, rows):
    assert pack(lengths, 64) == rows


def test_a_sample_over_the_budget_sits_alone():
    assert pack([3, 100, 2, 1, 101, 4], 10) == [[0, 2, 3, 5], [1], [4]]


def test_nothing_packs_into_nothing():
    assert pack([], 10) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 40))
def test_every_sample_once_in_the_first_row_with_room(lengths, budget):
    rows = pack(lengths, budget)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for number, row in enumerate(rows):
        assert row == sorted(row)
        assert len(row) == 1 or sum(lengths[i] for i in row) <= budget
        for earlier in rows[:number]:
            before = sum(lengths[i] for i in earlier if i < row[0])
            assert before + lengths[row[0]] > budget, "an earlier row had room"
