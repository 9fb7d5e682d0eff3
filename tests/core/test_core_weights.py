from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from whet.core.weights import (
    REDUCERS,
    build_reducer,
    group_mean,
    sample_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum_mean,
)


@st.composite
def descriptions(draw):
    """Samples as (mask, trajectory, valid); a trajectory may have several samples, and they agree on validity."""
    valid = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    masks = st.text(".#", max_size=6).map(lambda tail: "." + tail)
    count = draw(st.integers(1, 7))
    owners = [draw(st.integers(0, len(valid) - 1)) for _ in range(count)]
    return [(draw(masks), owner, valid[owner]) for owner in owners]


@settings(max_examples=60, deadline=None)
@given(descriptions())
def test_token_mean_is_one_over_the_trained_tokens(described):
    b = batch(*(sample(m, trajectory=str(t), valid=v) for m, t, v in described))
    trained = sum(m.count("#") for m, _, v in described if v)
    expected = [(1 / trained if c == "#" and v else 0.0) for m, _, v in described for c in m]
    torch.testing.assert_close(token_mean(b).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(descriptions())
def test_sample_mean_shares_equally_between_trajectories_then_tokens(described):
    b = batch(*(sample(m, trajectory=str(t), valid=v) for m, t, v in described))
    tokens = {t: sum(m.count("#") for m, u, _ in described if u == t) for _, t, _ in described}
    num_valid = len({t for _, t, v in described if v})
    expected = [(1 / tokens[t] / num_valid if c == "#" and v else 0.0) for m, t, v in described for c in m]
    torch.testing.assert_close(sample_mean(b).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_masking_one_trajectory_does_not_make_the_others_louder():
    whole = batch(sample(".##", trajectory="a"), sample(".##", trajectory="b"))
    masked = batch(sample(".##", trajectory="a"), sample("...", trajectory="b"))
    assert sample_mean(whole)[:3].tolist() == sample_mean(masked)[:3].tolist() == [0.0, 0.25, 0.25]


def test_a_failed_trajectory_counts_nowhere():
    b = batch(sample(".##", trajectory="a"), sample(".##", trajectory="b", valid=False))
    assert sample_mean(b).tolist() == token_mean(b).tolist() == [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("reducer", REDUCERS.values(), ids=REDUCERS.keys())
@pytest.mark.parametrize("valid", [True, False])
def test_without_a_trained_token_every_weight_is_zero(reducer, valid):
    b = batch(sample("...", valid=valid), sample(".", trajectory="u", valid=valid))
    assert reducer(b).tolist() == [0.0] * 4


def test_weights_are_those_of_the_step_that_they_are_computed_on():
    b = batch(*(sample(".#" + "#" * i, trajectory=str(i)) for i in range(4)))
    assert sample_mean(b.select([3, 1])).sum().item() == pytest.approx(1)
    assert token_mean(b.select([3, 1])).max().item() == pytest.approx(1 / 6)


@given(descriptions())
def test_every_group_counts_the_same(described):
    rows = [(m, t, v, t % 2) for m, t, v in described]
    b = batch(*(sample(m, trajectory=str(t), valid=v, group=str(g)) for m, t, v, g in rows))
    tokens = {g: sum(m.count("#") for m, _, v, h in rows if v and h == g) for *_, g in rows}
    num_groups = len({g for *_, v, g in rows if v})
    expected = [(1 / tokens[g] / num_groups if c == "#" and v else 0.0) for m, _, v, g in rows for c in m]
    torch.testing.assert_close(group_mean(b).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@given(descriptions())
def test_sums_and_means_over_samples(described):
    b = batch(*(sample(m, trajectory=str(t), valid=v) for m, t, v in described))
    trained = [m.count("#") if v else 0 for m, _, v in described]
    used = sum(n > 0 for n in trained)
    num_valid = len({t for _, t, v in described if v})
    for reducer, share in (
        (sequence_mean, lambda n: 1 / n / used),
        (sequence_sum, lambda n: 1 / used),
        (token_sum_mean, lambda n: 1 / num_valid),
        (build_reducer("constant", 7.0), lambda n: 1 / 7),
        (build_reducer("constant_length", 7.0), lambda n: 1 / 7 / num_valid),
    ):
        expected = [(share(n) if c == "#" and n else 0.0) for (m, *_), n in zip(described, trained, strict=True) for c in m]
        torch.testing.assert_close(reducer(b).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_part_of_a_step_takes_the_steps_total(name):
    parts = [batch(sample(".##", trajectory="a", group="a")), batch(sample(".#", trajectory="b", group="b"))]
    whole = batch(sample(".##", trajectory="a", group="a"), sample(".#", trajectory="b", group="b"))
    total = 3.0 if name == "token_mean" else 2.0
    found = torch.cat([REDUCERS[name](part, total=total) for part in parts])
    torch.testing.assert_close(found, REDUCERS[name](whole))


def test_a_scale_belongs_to_the_reducers_that_divide_by_one():
    with pytest.raises(ValueError, match="set reducer_scale"):
        build_reducer("constant_length")
    with pytest.raises(ValueError, match="takes no scale, but reducer_scale is 3"):
        build_reducer("token_mean", 3)
    assert build_reducer("group_mean") is group_mean
