"""Differences of tensors give back every bit, whatever the bits are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.transport.changes import apply_change, change_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int64, torch.bool]


@settings(max_examples=80, deadline=None)
@given(dtype=st.sampled_from(DTYPES), size=st.integers(1, 300), share=st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]), seed=st.integers(0, 999))
def test_what_is_changed_comes_back_to_the_bit(dtype, size, share, seed):
    random = np.random.default_rng(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    before = random.integers(0, 2 if dtype is torch.bool else 256, size * width, dtype=np.uint8)
    after = before.copy()
    where = random.random(size * width) < share
    after[where] = random.integers(0, 2 if dtype is torch.bool else 256, int(where.sum()), dtype=np.uint8)
    old, new = (torch.from_numpy(bits.copy()).view(dtype) for bits in (before, after))
    change = change_of(old, new)
    assert torch.equal(apply_change(old, change).view(torch.uint8), torch.from_numpy(after))
    assert torch.equal(old.view(torch.uint8), torch.from_numpy(before)), "the base is left as it was"


def test_shapes_are_kept_and_empty_tensors_too():
    old = torch.randn(3, 4, 5)
    assert torch.equal(apply_change(old, change_of(old, old + 1)), old + 1)
    empty = torch.zeros(0, 7)
    assert apply_change(empty, change_of(empty, empty)).shape == (0, 7)


@pytest.mark.parametrize("share", [1, 50])
def test_changes_of_another_tensor_are_refused(share):
    old = torch.zeros(100)
    new = old.clone()
    new[::share] = 1.0
    change = change_of(old, new)
    with pytest.raises(ValueError, match="what changed is of a"):
        apply_change(torch.zeros(10), change)
    with pytest.raises(ValueError, match="another checksum"):
        apply_change(old, replace(change, packed=change.packed[:-1]))
