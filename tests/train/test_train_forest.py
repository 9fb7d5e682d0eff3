from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.model.forest import spans_of
from whet.train.torch_native.forest import forest_of, pack_forests


@st.composite
def trees(draw, alphabet=3):
    """Sequences of which many begin alike: extensions, prefixes and copies of earlier ones, and new ones."""
    out = []
    for _ in range(draw(st.integers(1, 9))):
        base = draw(st.sampled_from(out)) if out and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        added = draw(st.lists(st.integers(0, alphabet - 1), max_size=6))
        out.append(kept + added or [0])
    return out


def tensors(sequences):
    return [torch.tensor(sequence) for sequence in sequences]


def prefixes(sequences):
    return {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}


@settings(max_examples=200, deadline=None)
@given(trees())
def test_every_distinct_prefix_has_one_token_and_its_path_spells_it(sequences):
    forest = forest_of(tensors(sequences))
    assert len(forest.tokens) == len(prefixes(sequences)) == sum(s.length for s in forest.segments)
    assert all(s.length > 0 for s in forest.segments)
    spans = spans_of(forest.segments)
    path_of = {}
    for segment, span in zip(forest.segments, spans, strict=True):
        path = path_of[spans[segment.parent].end - 1] if segment.parent >= 0 else ()
        for t in range(span.start, span.end):
            path = path_of[t] = (*path, t)
    for sequence, place in zip(sequences, forest.place.split([len(s) for s in sequences]), strict=True):
        assert tuple(place.tolist()) == path_of[int(place[-1])]
        assert forest.tokens[place].tolist() == sequence


@settings(max_examples=60, deadline=None)
@given(trees(), st.randoms())
def test_a_forest_does_not_depend_on_the_order_of_its_sequences(sequences, rng):
    shuffled = list(sequences)
    rng.shuffle(shuffled)
    found, expected = forest_of(tensors(shuffled)), forest_of(tensors(sequences))
    assert found.segments == expected.segments and torch.equal(found.tokens, expected.tokens)


def test_segments_end_at_branches_alone():
    forest = forest_of(tensors([[5, 6, 7, 8], [5, 6, 9], [5, 6], [5, 6, 7, 8, 1], [4]]))
    assert [(s.length, s.parent) for s in forest.segments] == [(1, -1), (2, -1), (3, 1), (1, 1)]
    assert forest.tokens.tolist() == [4, 5, 6, 7, 8, 1, 9]
    assert forest.place.tolist() == [1, 2, 3, 4, 1, 2, 6, 1, 2, 1, 2, 3, 4, 5, 0]


@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(1, 40))
def test_rows_hold_every_sequence_once_within_the_budget(sequences, budget):
    rows, num_tokens = pack_forests(tensors(sequences), budget)
    assert sorted(i for row in rows for i in row) == list(range(len(sequences)))
    sizes = [len(prefixes([sequences[i] for i in row])) for row in rows]
    assert num_tokens == sum(sizes)
    assert all(row == sorted(row) for row in rows)
    assert all(size <= budget or len({tuple(sequences[i]) for i in row}) == 1 for row, size in zip(rows, sizes, strict=True))
    if len(prefixes(sequences)) <= budget:
        assert len(rows) == 1


def test_a_tree_over_the_budget_is_cut_between_its_groups_and_repeats_its_root():
    system, first, second = [1] * 4, [2] * 10, [3] * 10
    replies = [[4, 4], [5, 5], [6, 6]]
    sequences = [system + prompt + reply for prompt in (first, second) for reply in replies]
    random.Random(0).shuffle(order := list(range(6)))
    rows, num_tokens = pack_forests(tensors([sequences[i] for i in order]), 25)
    assert sorted(sorted(order[i] for i in row) for row in rows) == [[0, 1, 2], [3, 4, 5]]
    assert num_tokens == 2 * (4 + 10 + 6)


def test_a_subtree_over_the_budget_repeats_its_path_and_fills_rows():
    sequences = [[1, 2, 3, 10 + i, i] for i in range(5)]
    assert pack_forests(tensors(sequences), 7) == ([[0, 1], [2, 3], [4]], 7 + 7 + 5)
    assert pack_forests(tensors(sequences), 3) == ([[0], [1], [2], [3], [4]], 25)
    assert pack_forests(tensors(sequences), 13) == ([[0, 1, 2, 3, 4]], 13)


def test_room_in_an_earlier_row_counts_what_it_already_holds():
    a, b = [[1, 1, 1, 1, i] for i in (1, 2)], [[2] * 9]
    late = [[1, 1, 1, 3, 3]]
    rows, num_tokens = pack_forests(tensors([*a, *late, *b]), 9)
    assert (rows, num_tokens) == ([[0, 1, 2], [3]], 8 + 9)


@pytest.mark.parametrize("budget", [1, 100])
def test_nothing_packs_into_nothing(budget):
    assert pack_forests([], budget) == ([], 0)
