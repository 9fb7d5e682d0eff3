"""Samples that a loss looks at together are in one row, whatever the rows are; and no cut changes the gradient of pairs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.tiny_policy import VOCAB, gradients, policy, relative
from whet.algo.base import Need
from whet.algo.dpo import dpo_loss
from whet.algo.preference_config import DpoConfig
from whet.core.preference import pair_batch
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.train.torch_native.layout import plan_rows
from whet.types import UNSAMPLED, Origin, Pair, Sample


def sample(prompt, reply):
    num = len(prompt) + len(reply)
    mask = (False,) * len(prompt) + (True,) * len(reply)
    return Sample((*prompt, *reply), (Origin.PROMPT,) * num, mask, (0.0,) * num, (UNSAMPLED,) * num, group="g", trajectory="t")


def drawn_pairs(sizes, seed):
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    out = []
    for num_prompt, num_chosen, num_rejected in sizes:
        prompt = ids(num_prompt)
        out.append(Pair(sample(prompt, ids(num_chosen)), sample(prompt, ids(num_rejected)), margin=0.25))
    return out


SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


@settings(deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 99), budget=st.integers(1, 80), rows=st.sampled_from(["auto", "forest", "chains"]))
def test_no_pair_is_parted_and_none_is_lost(sizes, seed, budget, rows):
    batch = pair_batch(drawn_pairs(sizes, seed))
    plan = plan_rows(batch, rows, budget)
    assert sorted(i for row in plan.rows for i in row) == list(range(batch.num_samples))
    for row in plan.rows:
        part = batch.select(row)
        assert torch.equal(part.unit[0::2], part.unit[1::2]), row
        distinct = {tuple(t[: i + 1]) for t in map(torch.Tensor.tolist, part.tokens.split(part.lengths.tolist())) for i in range(len(t))}
        used = len(distinct) if plan.kind == "forest" else part.num_tokens
        assert used <= budget or len(row) == 2


def test_a_unit_in_which_nothing_trains_is_left_out_and_one_half_that_trains_keeps_the_other():
    batch = pair_batch(drawn_pairs([(3, 2, 2), (3, 2, 2), (3, 2, 2)], 0))
    mask = batch.loss_mask.clone()
    mask[batch.sample_of_token <= 1] = False
    mask[batch.sample_of_token == 4] = False
    assert plan_rows(batch.with_(loss_mask=mask), "auto", 1000).rows == [[2, 3, 4, 5]]


@pytest.mark.parametrize("rows", ["forest", "chains"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_no_cut_changes_the_gradient_of_pairs(rows, budget):
    loss = dpo_loss(DpoConfig(beta=0.7, sft_coef=0.3, label_smoothing=0.1))
    sizes = [(9, 4, 6), (5, 2, 3), (12, 7, 1), (3, 3, 3)]

    def run(dtype, rows, budget):
        batch = pair_batch(drawn_pairs(sizes, 1))
        model = policy(dtype)
        backend = TorchBackend(model, TrainConfig(max_tokens_per_device=budget, rows=rows), 1)
        batch = policy_reference(dtype).annotate(batch, Need.REF_LOGPROBS)
        return backend.forward_backward(batch, loss).loss, torch.cat([g.flatten() for g in gradients(model).values()])

    def policy_reference(dtype):
        return TorchBackend(policy(dtype, seed=1), TrainConfig(), None)

    expected_loss, expected = run("float32", "chains", 10_000)
    found_loss, found = run("float32", rows, budget)
    assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(found, expected) < 1e-5
