"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

from __future__ import annotations

import torch

from whet.algo.base import LossTerms
from whet.core.batch import TokenOutputs, TrainBatch
from whet.observe.metrics import Mean, Total


def sft_loss(batch: TrainBatch, out: TokenOutputs) -> LossTerms:
    """-log p of each token; in nats."""
    mask = batch.loss_mask
    nll = torch.where(mask, -out.logprobs, torch.zeros_like(out.logprobs))
    count = mask.sum()
    return LossTerms(nll, {"sft/loss": Mean(nll.detach().sum(), count), "sft/tokens": Total(count)})
