"""Metrics of routing replay: the distance between trainer and engine with it and without, and the share of unknown experts."""

from __future__ import annotations

import torch

from whet.algo.base import Need
from whet.core.batch import TrainBatch, as_list
from whet.observe.metrics import Mean, Metrics
from whet.train.base import Backend
from whet.types import Origin

SHARE = 32
"""One of this number of trained tokens is computed twice more, with replay and without."""


def replay_metrics(batch: TrainBatch, policy: Backend) -> Metrics:
    """Mean distances from the engine's log-probs over a rollout's first samples, and the share of experts that no engine reported.

    Args:
        batch: the rollout, with the engine's experts.
        policy: under the weights that the update begins with.
    """
    part, out = batch.select(_first_samples(batch)), _unknown(batch)
    sampled = part.loss_mask & (part.origin == int(Origin.MODEL))
    if not bool(sampled.any()):
        return out

    def distance(each: TrainBatch) -> Mean:
        found = policy.annotate(each, Need.OLD_LOGPROBS).old_logprobs
        assert found is not None, "log-probs were asked for"
        nats = (found - part.rollout_logprobs)[sampled].double().abs()
        return Mean(nats.sum(), len(nats))

    return {**out, "routing/mismatch": distance(part), "routing/mismatch_without": distance(part.with_(routes=None))}


def _first_samples(batch: TrainBatch) -> list[int]:
    """The first samples that have a share of the trained tokens, at least one if there is any."""
    trained = [int(mask.sum()) for mask in batch.loss_mask.split(as_list(batch.lengths))]
    chosen, left = list[int](), sum(trained) / SHARE
    for i, count in enumerate(trained):
        if count and left > 0:
            chosen.append(i)
            left -= count
    return chosen


def _unknown(batch: TrainBatch) -> Metrics:
    """Share of tokens and layers whose experts no engine reported, where the trainer's routers choose. A sample's last token has none."""
    assert batch.routes is not None
    unknown = (batch.routes == 0).any(-1)
    before = torch.ones(batch.num_tokens, dtype=torch.bool).index_fill_(0, batch.starts[batch.lengths > 0], False)
    return {"routing/unknown": Mean(int(unknown[before].sum()), int(before.sum()) * unknown.shape[1])}
