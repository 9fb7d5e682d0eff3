import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from whet.observe.metrics import Last, Max, Mean, Min, Total, distribution, flatten, merge_metrics


def test_a_mean_divides_once_so_it_is_no_mean_of_means():
    merged = Mean(1.0, 1).merge(Mean(8.0, 3))
    assert merged == Mean(9.0, 4)
    assert merged.value == 2.25  # the mean of the two means would be 1.8333


def test_a_mean_of_nothing_has_no_value():
    assert Mean(0.0, 0).value is None
    assert Mean(0.0, 0).merge(Mean(3.0, 2)).value == 1.5
    assert Mean(5.0).value == 5.0


def test_each_kind_reduces_in_its_own_way():
    assert Max(2.0).merge(Max(5.0)).merge(Max(3.0)).value == 5.0
    assert Min(2.0).merge(Min(5.0)).merge(Min(-3.0)).value == -3.0
    assert Total(2.0).merge(Total(5.0)).value == 7.0
    assert Last(2.0).merge(Last(1.0)).value == 1.0


def test_the_extreme_of_nothing_has_no_value():
    assert Max(-math.inf).value is None and Min(math.inf).value is None
    assert Max(-math.inf).merge(Max(-4.0)).value == -4.0
    assert Min(math.inf).merge(Min(4.0)).value == 4.0
    assert Max(math.inf).value == math.inf and Min(-math.inf).value == -math.inf


@pytest.mark.parametrize("kind", [Max, Min])
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_extremes_do_not_lose_a_nan(kind, number):
    for a, b in [(math.nan, 1.0), (1.0, math.nan)]:
        assert math.isnan(kind(number(a)).merge(kind(number(b))).value)


def test_tensors_and_numbers_mix():
    merged = Mean(torch.tensor(3.0), torch.tensor(2)).merge(Mean(1.0, 2))
    assert isinstance(merged.sum, torch.Tensor) and merged.value == 1.0
    assert Max(torch.tensor(3.0)).merge(Max(4)).value == 4.0
    assert Min(2).merge(Min(torch.tensor(3.0))).value == 2.0
    assert Total(torch.tensor(3)).merge(Total(0.5)).value == 3.5


class _NoReads(TorchDispatchMode):
    """Fails where a tensor's value is brought to the host: on a GPU that is a synchronisation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        return func(*args, **(kwargs or {}))


def test_merging_never_reads_a_tensor():
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    with _NoReads():
        merged = Mean(one, two).merge(Mean(two, two))
        for kind in (Max, Min, Total, Last):
            merge_metrics({"x": kind(one)}, {"x": kind(two)})
    assert merged.value == 0.75
    with pytest.raises(AssertionError, match="was read"), _NoReads():
        float(one)


def test_tensors_are_detached_and_widened():
    leaf = torch.tensor(2.0, requires_grad=True)
    kept = Total(leaf * 3).number
    assert isinstance(kept, torch.Tensor) and not kept.requires_grad and kept.grad_fn is None
    half = torch.tensor(1.0, dtype=torch.bfloat16)
    total = Total(torch.tensor(256.0, dtype=torch.bfloat16))
    for _ in range(8):
        total = total.merge(Total(half))
    assert total.value == 264.0  # bfloat16 would stay at 256
    assert Total(torch.tensor(True)).merge(Total(torch.tensor(True))).value == 2.0
    assert Total(torch.tensor(255, dtype=torch.uint8)).merge(Total(torch.tensor(1, dtype=torch.uint8))).value == 256.0
    assert Total(torch.tensor(1.0, dtype=torch.float64)).number.dtype is torch.float64


def test_a_tensor_of_many_numbers_is_refused():
    with pytest.raises(ValueError, match=r"Mean\.sum takes one number, not a tensor of shape \(2,\)"):
        Mean(torch.ones(2), 2)


def test_merging_sets_keeps_what_either_has_and_names_a_clash():
    merged = merge_metrics({"a": Total(1.0), "b": Last(1.0)}, {"b": Last(2.0), "c": Max(3.0)})
    assert merged == {"a": Total(1.0), "b": Last(2.0), "c": Max(3.0)}
    with pytest.raises(ValueError, match="metric 'a': cannot merge a Total with a Mean"):
        merge_metrics({"a": Total(1.0)}, {"a": Mean(1.0)})


def test_flatten_drops_what_has_no_data():
    assert flatten({"a": Mean(0.0, 0), "b": Mean(torch.tensor(1.0), 4), "c": Max(-math.inf)}) == {"b": 0.25}


def test_distribution():
    assert flatten(distribution("len", [3, 1, 8])) == {"len/mean": 4.0, "len/min": 1.0, "len/max": 8.0}
    assert list(distribution("len", [])) == ["len/mean", "len/min", "len/max"]
    assert flatten(distribution("len", [])) == {}


numbers = st.lists(st.integers(-1000, 1000), max_size=20)


@given(numbers, numbers)
def test_a_split_never_changes_a_distribution(left, right):
    merged = merge_metrics(distribution("x", left), distribution("x", right))
    assert flatten(merged) == flatten(distribution("x", left + right))
