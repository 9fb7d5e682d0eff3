import pickle
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.types.columns import Doubles, Floats, Growing, Ints, Ragged, Runs, in_step, num_true

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
KINDS = {Ints: INT32, Floats: FLOAT32, Doubles: st.floats(allow_nan=False), Runs: st.integers(0, 2)}
IDS = st.lists(INT32, max_size=3).map(lambda ids: np.array(ids, dtype=np.int32).tobytes())


@pytest.mark.parametrize("kind", [*KINDS, Ragged])
@given(data=st.data())
def test_a_column_reads_like_a_tuple_of_its_items(kind, data):
    items = tuple(data.draw(st.lists(IDS if kind is Ragged else KINDS[kind], max_size=12)))
    column = kind(items)
    assert column == items and items == column and column == list(items) and len(column) == len(items)
    assert tuple(column) == items and column.tolist() == list(items) and repr(column) == repr(items) and hash(column) == hash(items)
    start, stop, step = data.draw(st.integers(-13, 13)), data.draw(st.integers(-13, 13)), data.draw(st.sampled_from([1, 2, -1]))
    assert column[start:stop:step] == items[start:stop:step] and type(column[start:stop:step]) is kind
    for i in range(-len(items), len(items)):
        assert column[i] == items[i]
    for i in (len(items), -len(items) - 1):
        with pytest.raises(IndexError):
            column[i]
    assert pickle.loads(pickle.dumps(column)) == column and kind.of(column) is column
    assert kind.join([column[:3], column[3:], kind()]) == column
    changed = (*items[:-1], type(items[-1])() if items[-1] else (b"0000" if kind is Ragged else 1)) if items else (0,)
    assert column != changed and column != (*items, 0) and column != "x"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_arrays_of_a_column_have_its_items_and_cannot_be_written(kind, data):
    items = data.draw(st.lists(KINDS[kind], min_size=1, max_size=12))
    found = kind(items).numpy()
    assert found.tolist() == items and np.asarray(kind(items)).tolist() == items
    with pytest.raises(ValueError):
        found[0] = 1
    if kind is not Runs:
        assert kind(np.array(items, dtype=found.dtype)) == items and kind.frombytes(kind(items).tobytes()) == items
        assert kind(np.array(items * 2, dtype=found.dtype)[::2]) == (items * 2)[::2]


def test_runs_of_an_array_have_python_s_values():
    assert [type(value) for value in Runs(np.array([True, True, False])).values] == [bool, bool]
    assert Runs(np.array([3, 3, 4])).runs() == [(3, 2), (4, 1)]


def test_floats_are_compared_as_32_bits_have_them():
    assert Floats([0.1]) == (0.1,) and Floats([0.1])[0] != 0.1 and Floats([0.1]) != (0.1001,)


@pytest.mark.parametrize(("kind", "items"), [(Ints, [1.5]), (Ints, [2**31]), (Ints, ["a"]), (Floats, [None]), (Ints, 3)])
def test_what_is_no_such_number_is_refused(kind, items):
    with pytest.raises((ValueError, TypeError)):
        kind(items)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4))), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4))))
def test_runs_in_step_are_those_of_both(one, other):
    a = Runs(chain.from_iterable([value] * n for value, n in one))
    b = Runs(chain.from_iterable([value] * n for value, n in other))
    assert Runs.from_runs(one) == a and num_true(a) == sum(a)
    assert all(left != right for (left, _), (right, _) in zip(a.runs(), a.runs()[1:], strict=False))
    if len(a) != len(b):
        with pytest.raises(ValueError):
            list(in_step(a, b))
        return
    assert list(chain.from_iterable([(x, y)] * n for x, y, n in in_step(a, b))) == list(zip(a, b, strict=True))


@given(st.lists(st.lists(INT32, max_size=5)))
def test_a_growing_column_has_what_was_added_and_earlier_columns_stay(parts):
    growing, before = Growing(Ints), []
    for part in parts:
        growing.extend(part)
        before.append((growing.column(), sum(map(len, parts[: len(before) + 1]))))
    whole = list(chain.from_iterable(parts))
    assert growing.column() == whole and len(growing) == len(whole)
    assert all(column == whole[:length] for column, length in before)


def test_counts_and_ids_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="counts of 3 ids for 2"):
        Ragged.of_parts(Ints([1, 2]), Ints([7, 8]))
