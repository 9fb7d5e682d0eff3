from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from whet.core.batch import PER_SAMPLE, batch_of, one_per_trajectory
from whet.types import Origin


def test_columns_are_the_samples_one_after_the_other():
    b = batch(
        sample(".##", group="x", trajectory="x0", reward=1.5, first=10),
        sample("..", group="y", trajectory="y0", first=20),
        sample(".#", group="x", trajectory="x0", reward=1.5, order=1, first=30),
    )
    assert b.tokens.tolist() == [10, 11, 12, 20, 21, 30, 31]
    assert b.lengths.tolist() == [3, 2, 2]
    assert b.starts.tolist() == [0, 3, 5]
    assert b.sample_of_token.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert b.loss_mask.tolist() == [False, True, True, False, False, False, True]
    assert b.origin.tolist() == [Origin.PROMPT, 1, 1, 0, 0, 0, 1]
    assert b.rollout_logprobs.tolist() == [0.0, -0.5, -1.0, 0.0, 0.0, 0.0, -0.5]
    assert b.versions.tolist() == [-1, 3, 3, -1, -1, -1, 3]
    assert b.group.tolist() == [0, 1, 0]
    assert b.trajectory.tolist() == [0, 1, 0]
    assert b.order.tolist() == [0, 0, 1]
    assert b.rewards.dtype == torch.float64 and b.rewards.tolist() == [1.5, 0.0, 1.5]
    assert b.ragged(b.rollout_logprobs) == [[0.0, -0.5, -1.0], [0.0, 0.0], [0.0, -0.5]]


def test_a_failed_trajectory_has_no_trained_token():
    b = batch(sample(".##", valid=False), sample(".#", trajectory="u"))
    assert b.loss_mask.tolist() == [False, False, False, False, True]
    assert b.valid.tolist() == [False, True]


def test_no_samples_and_greedy_samples_are_refused():
    with pytest.raises(ValueError, match="no samples to train on"):
        batch_of([])
    with pytest.raises(ValueError, match=r"trajectory odd was sampled at temperature 0.*above 0"):
        batch_of([replace(sample(".#", trajectory="odd"), temperature=0.0)])


def test_columns_that_do_not_fit_are_refused():
    b = batch(sample(".##"))
    with pytest.raises(ValueError, match=r"column advantages has shape \(2,\), expected \(3,\)"):
        b.with_(advantages=torch.zeros(2))
    with pytest.raises(ValueError, match="lengths sum to 4, but there are 3 tokens"):
        b.with_(lengths=torch.tensor([4]))
    with pytest.raises(ValueError, match="first token of a sample"):
        b.with_(loss_mask=torch.tensor([True, True, True]))


def test_with_leaves_the_original_alone():
    b = batch(sample(".##"))
    changed = b.with_(advantages=torch.ones(3))
    assert b.advantages is None and changed.advantages is not None
    assert changed.with_(advantages=None).advantages is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_select_takes_samples_in_the_order_asked_for(lengths, data):
    b = batch(*(sample("." + "#" * (n - 1), trajectory=str(i), first=10 * i) for i, n in enumerate(lengths)))
    b = b.with_(advantages=torch.arange(b.num_tokens, dtype=torch.float32))
    sizes = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=b.num_tokens, max_size=b.num_tokens)))
    ids = torch.arange(int(sizes.sum()), dtype=torch.int32)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    part = b.with_(nucleus_sizes=sizes, nucleus_ids=ids).select(chosen)
    nuclei = [[ids.tolist() for ids in sample] for sample in _split(ids.split(sizes.tolist()), lengths)]
    expected = [ids for i in chosen for ids in nuclei[i]]
    assert [ids.tolist() for ids in part.nucleus_ids.split(part.nucleus_sizes.tolist())] == expected
    for name, column in b.columns().items():
        pieces = column.tolist() if name in PER_SAMPLE else b.ragged(column)
        found = part.columns()[name]
        assert (found.tolist() if name in PER_SAMPLE else part.ragged(found)) == [pieces[i] for i in chosen], name


def _split(items, lengths):
    out, place = [], 0
    for length in lengths:
        out.append(items[place : place + length])
        place += length
    return out


def test_nuclei_that_do_not_fit_are_refused():
    b = batch(sample(".##"))
    with pytest.raises(ValueError, match="come together"):
        b.with_(nucleus_sizes=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"column nucleus_ids has shape \(2,\), expected \(3,\)"):
        b.with_(nucleus_sizes=torch.tensor([0, 1, 2]), nucleus_ids=torch.zeros(2, dtype=torch.int32))


def test_select_of_nothing_is_empty():
    part = batch(sample(".##")).select([])
    assert (part.num_samples, part.num_tokens) == (0, 0)


def test_one_per_trajectory_skips_siblings_and_failures():
    b = batch(
        sample(".#", trajectory="bad", valid=False),
        sample(".#", trajectory="a"),
        sample(".#", trajectory="b"),
        sample(".#", trajectory="a", order=1),
    )
    assert one_per_trajectory(b).tolist() == [1, 2]


def test_a_batch_moves_as_a_whole():
    columns = batch(sample(".##")).with_(advantages=torch.ones(3)).to(torch.device("cpu")).columns()
    assert len(columns) == 13 and {column.device.type for column in columns.values()} == {"cpu"}
    assert columns["rewards"].dtype == torch.float64


def test_token_rewards_are_a_column_if_any_sample_has_them():
    plain, failed = sample(".#"), replace(sample(".#", trajectory="u", valid=False), token_rewards=(0.0, 9.0))
    rewarded = replace(sample(".##", trajectory="v"), token_rewards=(0.0, 0.5, -1.0))
    assert batch(plain).token_rewards is None
    assert batch(plain, failed, rewarded).token_rewards.tolist() == [0, 0, 0, 0, 0, 0.5, -1.0]
    with pytest.raises(ValueError, match="'token_rewards': 1"):
        replace(plain, token_rewards=(1.0,))


def test_what_was_cut_is_a_column_if_anything_was():
    whole, cut = sample(".#"), replace(sample(".##", trajectory="u"), truncated=True)
    assert batch(whole).truncated is None
    assert batch(whole, cut).truncated.tolist() == [False, True]
    assert batch(whole, cut).select([1]).truncated.tolist() == [True]


def test_a_baseline_goes_with_its_sample():
    b = batch(sample(".#"), sample(".##", trajectory="u")).with_(baseline=torch.tensor([1.0, 2.0]).double())
    assert b.select([1]).baseline.tolist() == [2.0]
