from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from tests.parity.verl_metrics import batch_mismatch, spread_of
from whet.core.choices import Correction, Rejection
from whet.core.correction import correct, divergence, geometric_weight, kept, normalizer, sampling_log_ratio, vetoed, within
from whet.core.mismatch import effective_sample_size, mismatch_of

SAMPLES = st.lists(st.lists(st.tuples(st.floats(-2, 2), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=4)


def columns_of(samples):
    b = batch(*(sample("." + "".join("#" if k else "." for _, k in rows), trajectory=str(i)) for i, rows in enumerate(samples)))
    return b, torch.tensor([x for rows in samples for x in (0.0, *(d for d, _ in rows))], dtype=torch.float64)


@given(SAMPLES, st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from(["truncate", "clip", "icepop", "mask"]))
def test_weights_are_bounded_ratios_of_the_level(samples, level, bound):
    b, log_ratio = columns_of(samples)
    found = correct(b, log_ratio, Correction(level, bound, high=1.5))
    place = 0
    for rows in samples:
        place += 1
        trained = [d for d, k in rows if k]
        pooled = {"sequence": sum(trained), "geometric": sum(trained) / max(len(trained), 1)}
        for d, _ in rows:
            raw = math.exp(d if level == "token" else pooled[level])
            inside = 1 / 1.5 <= raw <= 1.5
            weight = {
                "truncate": min(raw, 1.5),
                "clip": min(max(raw, 1 / 1.5), 1.5),
                "icepop": raw if inside else 0.0,
                "mask": raw,
            }[bound]
            if min(abs(raw - 1.5), abs(raw - 1 / 1.5)) > 1e-9:
                assert float(found.weights[place]) == pytest.approx(weight)
                assert bool(found.keep[place]) == (inside or bound != "mask")
                assert bool(within(b, log_ratio, level, 1 / 1.5, 1.5)[place]) == inside
            place += 1


@given(SAMPLES)
def test_rejection_statistics_are_their_formulas(samples):
    b, log_ratio = columns_of(samples)
    formulas = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
    pools = {"sum": sum, "mean": lambda x: sum(x) / len(x), "max": max}
    for kind, formula in formulas.items():
        tokens = divergence(b, log_ratio, f"token_{kind}")
        assert tokens.tolist() == pytest.approx([formula(float(d)) for d in log_ratio], abs=1e-9)
        for pool, reduce in pools.items():
            if (pool, kind) == ("max", "k1"):
                continue
            found = divergence(b, log_ratio, f"{pool}_{kind}")
            for i, rows in enumerate(samples):
                trained = [formula(d) for d, k in rows if k]
                assert float(found[b.starts[i]]) == pytest.approx(reduce(trained) if trained else 0.0, abs=1e-9)


def test_all_criteria_must_keep_a_token():
    b, log_ratio = columns_of([[(0.5, True), (-0.5, True), (0.0, True)]])
    assert kept(b, log_ratio, []).tolist() == [True] * 4
    upper = Rejection("token_k1", high=math.exp(0.4))
    assert kept(b, log_ratio, [upper]).tolist() == [True, False, False, True]
    lower = Rejection("token_k1", high=2.0, low=math.exp(-0.4))
    assert kept(b, log_ratio, [lower]).tolist() == [True, False, True, True]
    assert kept(b, log_ratio, [lower, Rejection("token_k2", high=0.1)]).tolist() == [True, False, False, True]


def test_one_bad_token_vetoes_its_sample():
    b, log_ratio = columns_of([[(-3.0, True), (0.0, True)], [(-3.0, False), (0.0, True)]])
    assert vetoed(b, log_ratio, 0.1).tolist() == [True] * 3 + [False] * 3


def test_the_normalizer_makes_the_mean_1():
    b, log_ratio = columns_of([[(0.5, True), (1.0, True), (9.0, False)], [(-1.0, True)], [(3.0, False)]])
    token = correct(b, log_ratio, Correction("token", "truncate", 2.0)).weights
    expected = statistics.fmean([math.exp(0.5), 2.0, math.exp(-1.0)])
    assert normalizer(b, token, "token") == pytest.approx(expected)
    sequence = correct(b, log_ratio, Correction("sequence", "truncate", 2.0)).weights
    assert normalizer(b, sequence, "sequence") == pytest.approx((2.0 + math.exp(-1.0)) / 2)
    assert normalizer(b, sequence, "sequence", empty_counts=True) == pytest.approx((2.0 + math.exp(-1.0)) / 3)
    assert normalizer(b, torch.zeros_like(token), "token") == 1.0


def test_a_samples_geometric_weight():
    b = batch(sample(".##"), sample(".", trajectory="u"))
    assert geometric_weight(b, torch.tensor([9.0, 1.0, 4.0, 9.0])).tolist() == pytest.approx([2.0, 2.0, 2.0, 1.0])


def test_weights_have_no_gradient():
    train = torch.tensor([-1.0], requires_grad=True)
    assert not sampling_log_ratio(train, torch.tensor([-2.0])).requires_grad


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"low is 3\.0 and high is 2\.0"):
        Correction(low=3.0)
    with pytest.raises(ValueError, match="must be positive"):
        Rejection("token_k1", high=-1.0)
    with pytest.raises(ValueError, match=r"leave out low=0\.5"):
        Rejection("token_k3", high=1.0, low=0.5)


def test_mismatch_by_hand():
    b = batch(sample(".##"), sample(".#.", trajectory="u"))
    train = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, 9.0])
    rollout = torch.tensor([0.0, -1.5, -1.0, 0.0, -0.75, -9.0])
    found = batch_mismatch(b, mismatch_of(b, train, rollout))
    ratios = [math.exp(0.5), math.exp(-1.0), math.exp(0.25)]
    assert found["training_log_ppl"] == pytest.approx((1.5 + 0.5) / 2)
    assert found["rollout_ppl"] == pytest.approx((math.exp(1.25) + math.exp(0.75)) / 2)
    assert found["kl"] == pytest.approx((-0.5 + 1.0 - 0.25) / 3)
    assert found["k3_kl"] == pytest.approx(statistics.fmean(r - 1 - math.log(r) for r in ratios))
    assert found["chi2_token"] == pytest.approx(statistics.fmean(r * r for r in ratios) - 1)
    assert found["chi2_seq"] == pytest.approx((math.exp(-1.0) + math.exp(0.5)) / 2 - 1)
    assert found["log_ppl_diff_max"] == pytest.approx(0.25) and found["log_ppl_diff_min"] == pytest.approx(-0.25)
    with pytest.raises(ValueError, match="nothing trains"):
        empty = b.with_(loss_mask=torch.zeros_like(b.loss_mask))
        batch_mismatch(empty, mismatch_of(empty, train, rollout))


def test_equal_weights_have_a_whole_effective_sample_size():
    mask = torch.tensor([True, True, False, True])
    assert effective_sample_size(torch.tensor([2.0, 2.0, 9.0, 2.0]), mask) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([3.0, 0.0, 9.0, 0.0]), mask) == pytest.approx(1 / 3)


def test_a_spread_by_hand():
    b = batch(sample(".##"), sample(".#", trajectory="u"), sample(".", trajectory="v"))
    found = spread_of(b, torch.tensor([9.0, 1.0, 3.0, 9.0, 8.0, 9.0]), 2.0, 4.0, ideal=1.0)
    assert (found.mean, found.lowest, found.highest) == (4.0, 1.0, 8.0)
    assert (found.share_below, found.share_above) == pytest.approx((1 / 3, 1 / 3))
    assert found.std == pytest.approx(statistics.pstdev([2.0, 3.0, 4.0]))
    assert (found.sample_mean, found.sample_lowest, found.sample_highest) == (5.0, 2.0, 8.0)
    assert found.sample_std == pytest.approx(statistics.stdev([2.0, 8.0]))
    assert (found.sample_deviation, found.sample_share_below, found.sample_share_above) == (7.0, 0.0, 0.5)
    assert spread_of(b, torch.zeros(6), 2.0, 4.0, all_samples=True).sample_share_below == 1.0
