"""Numbers of a rollout for its records: reasons why tokens do not train, scores of groups, uses of several epochs."""

from __future__ import annotations

import math

import pytest
import torch

from whet.algo.base import StepPlan
from whet.algo.config import GRPOConfig
from whet.algo.grpo import grpo
from whet.algo.policy_config import LossConfig
from whet.core.batch import TokenOutputs, batch_of
from whet.core.choices import Clip
from whet.train.base import TokenTerms
from whet.train.learners import Update
from whet.train.recorded import numbers_of
from whet.train.token_uses import UseTable
from whet.types import Origin, Sample

P, M, E = Origin.PROMPT, Origin.MODEL, Origin.ENVIRONMENT


def sample(name, mask, versions=(-1, 3, 3, -1, 3), reward=1.0, **changes):
    return Sample(
        (1, 2, 3, 4, 5), (P, M, M, E, M), tuple(map(bool, mask)), (0.0, -1.0, -1.0, 0.0, -1.0), versions, name.partition("/")[0], name,
        reward=reward, **changes
    )  # fmt: skip


def codes(batch, samples, oldest=2):
    found = numbers_of(batch, samples, Update({}, None, 0), oldest).columns["first_clip"]
    return [[None if math.isnan(x) else Clip(int(x)).name for x in row] for row in torch.tensor(found).split(batch.lengths.tolist())]


def test_every_token_of_the_model_that_does_not_train_has_its_reason():
    samples = [
        sample("a/0", (0, 0, 1, 0, 1), versions=(-1, 1, 3, -1, 3)),
        sample("a/1", (0, 0, 1, 0, 1)),
        sample("a/2", (0, 1, 1, 0, 1), valid=False),
    ]
    batch = batch_of(samples)
    kept = torch.ones(15, dtype=torch.bool).index_fill(0, torch.tensor([4]), False)
    batch = batch.with_(kept=kept, loss_mask=batch.loss_mask & kept)
    assert codes(batch, samples) == [
        [None, "TOO_OLD", None, None, "REJECTED"],
        [None, "MASKED", None, None, None],
        [None, "UNUSABLE", "UNUSABLE", None, "UNUSABLE"],
    ]


def test_scores_of_a_group_are_those_that_its_advantages_compare():
    samples = [sample(f"{group}/{i}", (0, 1, 1, 0, 1), reward=reward) for group, i, reward in (("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 4.0))]
    samples.append(sample("a/2", (0, 1, 1, 0, 1), reward=9.0, valid=False))
    batch = batch_of(samples)
    given = torch.zeros(20).index_fill(0, torch.tensor([1]), 0.5)
    batch = batch.with_(token_rewards=given, kl_rewards=-0.25 * given)
    found = numbers_of(batch, samples, Update({}, None, 0), 0).groups
    assert (found["a", ""].size, found["b", ""].size) == (2, 1)
    assert found["a", ""].mean == pytest.approx((1.375 + 2) / 2) and found["a", ""].std == pytest.approx((2 - 1.375) / math.sqrt(2))
    assert (found["b", ""].mean, found["b", ""].std) == (4.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["HIGH", "LOW", "NONE", "NONE"]),
        ({"clip_dual": 2.0}, ["HIGH", "LOW", "NONE", "DUAL"]),
        ({"mask_delta": 0.0}, ["HIGH", "SEQUENCE", "NONE", "SEQUENCE"]),
        ({"loss": LossConfig(name="clip_cov")}, ["COVARIANCE", "LOW", "NONE", "NONE"]),
        ({"correction": {"preset": "decoupled_token_is"}}, ["HIGH", "LOW", "REJECTED", "NONE"]),
    ],
)
def test_the_code_of_a_token_is_what_kept_its_gradient_back(settings, expected):
    """One token each of four samples: ratios of 1.5, 0.5, 1 and 4; the second and the last have a negative advantage."""
    samples = [sample(f"a/{i}", (0, 1, 0, 0, 0), reward=float(i)) for i in range(4)]
    ratios, advantages = torch.tensor([1.5, 0.5, 1.0, 4.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    batch, places = batch_of(samples), torch.tensor([1, 6, 11, 16])
    column = torch.zeros(20)
    old = column.index_fill(0, places, -2.0)
    logprobs = old.index_add(0, places, ratios.log())
    if "mask_delta" in settings:  # the last sample's policy moved away, too
        logprobs = logprobs.index_add(0, places[3:], torch.tensor([-math.log(16.0)]))
    batch = batch.with_(old_logprobs=old, advantages=column.index_add(0, places, advantages), weights=column.index_fill(0, places, 0.25))
    batch = batch.with_(correction=torch.ones(20), kept=torch.arange(20) != 11) if "correction" in settings else batch
    batch = batch.with_(chosen=torch.arange(20) == 1) if "loss" in settings else batch
    found = grpo(GRPOConfig.model_validate(settings), StepPlan(2)).loss(batch, TokenOutputs(logprobs, column))
    detail = found.detail()
    assert [Clip(int(code)).name for code in detail.clip[places]] == expected
    assert (detail.correction is None) == ("correction" not in settings)


def test_uses_are_of_the_first_and_of_the_last_step():
    batch = batch_of([sample(f"a/{i}", (0, 1, 1, 0, 1)) for i in range(3)])
    table = UseTable(batch)
    assert table.uses() is None

    def add(samples, number, computed=None):
        step = batch.select(samples).with_(weights=torch.full((5 * len(samples),), 0.5))
        count = 5 * len(samples if computed is None else computed)
        table.add(samples, step, computed, TokenTerms(*[torch.full((count,), float(number))] * 8))

    add([2, 0], 1)
    add([1], 2)
    assert table.uses().last is None
    add([0, 1], 3, computed=[1])
    add([2], 4)
    uses = table.uses()
    assert uses.first.terms.ratio[batch.loss_mask].tolist() == [1.0] * 3 + [2.0] * 3 + [1.0] * 3
    last = uses.last.terms
    assert last.ratio.nan_to_num(-1)[batch.loss_mask].tolist() == [-1.0] * 3 + [3.0] * 3 + [4.0] * 3
    assert last.clip[1:3].tolist() == [Clip.SKIPPED] * 2 and last.losses[1:3].tolist() == [0.0] * 2
    assert uses.last.weights[1] == 0.5 and bool(uses.last.weights[0].isnan())
