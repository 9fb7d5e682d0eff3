from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.evaluate.passk import pass_at_k


@given(st.integers(1, 8), st.data())
def test_equals_counting_every_draw(num, data):
    correct = data.draw(st.integers(0, num))
    k = data.draw(st.integers(1, num))
    draws = list(combinations([True] * correct + [False] * (num - correct), k))
    assert pass_at_k(num, correct, k) == pytest.approx(sum(any(d) for d in draws) / len(draws), abs=1e-12)


@pytest.mark.parametrize(("num", "correct", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_refuses_what_means_nothing(num, correct, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(num, correct, k)
