"""Numbers of each token, as the loss that trained had them, whatever the rows."""

from __future__ import annotations

import math

import pytest
import torch

from tests.train.test_train_backend import step_batch
from tests.train.tiny_policy import plain, policy
from whet.algo.base import LossTerms
from whet.algo.sft import sft_loss
from whet.core.choices import Clip
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import OptimConfig, TrainConfig


def passed(batch, loss, *, rows="chains", budget=1000, chunk=None, per_token=True):
    config = TrainConfig(optim=OptimConfig(), max_tokens_per_device=budget, logprob_chunk_tokens=chunk, rows=rows)
    return TorchBackend(policy("float32"), config, total_steps=10).forward_backward(batch, loss, entropy_grad=True, per_token=per_token)


@pytest.mark.parametrize("rows", ["chains", "forest"])
@pytest.mark.parametrize(("budget", "chunk"), [(1000, None), (40, 7)])
def test_the_terms_of_every_token_are_those_of_the_loss(rows, budget, chunk):
    algorithm, batch = step_batch()
    found = passed(batch, algorithm.loss, rows=rows, budget=budget, chunk=chunk)
    assert found.tokens is not None
    tokens, mask = found.tokens, batch.loss_mask
    for name in ("logprobs", "entropy", "ranks", "old_logprobs", "ratio", "clip", "losses"):
        column = getattr(tokens, name)
        assert torch.equal(column.isnan(), ~mask), name
    assert bool(tokens.correction.isnan().all())
    assert torch.equal(tokens.logprobs[mask], found.logprobs[mask])
    assert float(tokens.losses[mask].double().sum()) == pytest.approx(found.loss, rel=1e-6)
    torch.testing.assert_close(tokens.old_logprobs[mask], batch.old_logprobs[mask])
    ratio = (found.logprobs - batch.old_logprobs)[mask].double().exp()
    torch.testing.assert_close(tokens.ratio[mask].double(), ratio, rtol=1e-5, atol=1e-6)
    advantages = batch.advantages[mask]
    codes = torch.zeros(len(ratio)).masked_fill((ratio > 1.28) & (advantages > 0), float(Clip.HIGH))
    codes = codes.masked_fill((ratio < 0.8) & (advantages < 0), float(Clip.LOW))
    assert torch.equal(tokens.clip[mask], codes)
    assert {Clip.HIGH, Clip.LOW, Clip.NONE} <= set(codes.int().tolist())


def test_ranks_are_places_among_the_logits():
    algorithm, batch = step_batch()
    found = passed(batch, algorithm.loss, rows="forest", chunk=5).tokens
    model = plain(policy("float32"))
    for tokens, ranks in zip(batch.tokens.split(batch.lengths.tolist()), found.ranks.split(batch.lengths.tolist()), strict=True):
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        above = (logits > logits.gather(-1, tokens[1:, None])).sum(-1) + 1
        trained = ~ranks[1:].isnan()
        assert torch.equal(ranks[1:][trained].long(), above[trained])


def test_a_loss_without_detail_leaves_its_columns_unknown():
    _, batch = step_batch()
    found = passed(batch, sft_loss).tokens
    mask = batch.loss_mask
    assert not bool(found.losses[mask].isnan().any()) and not bool(found.ranks[mask].isnan().any())
    for name in ("old_logprobs", "ratio", "clip", "correction"):
        assert bool(getattr(found, name).isnan().all()), name


def test_nothing_is_made_where_nobody_asks():
    algorithm, batch = step_batch()

    def loss(part, out):
        assert out.ranks is None
        found = algorithm.loss(part, out)
        return LossTerms(found.terms, found.metrics, lambda: pytest.fail("nobody asked for the detail"))

    found = passed(batch, loss, per_token=False)
    assert found.tokens is None and math.isfinite(found.loss)
