"""Batches and model outputs for the tests of the algorithms."""

from __future__ import annotations

import torch

from whet.core.batch import TokenOutputs, TrainBatch, batch_of
from whet.types import Origin, Sample


def rollout(*trajectories) -> TrainBatch:
    """Each trajectory is (group, reward, valid, masks): one sample per mask, `#` where a token trains."""
    samples = []
    for i, (group, reward, valid, masks) in enumerate(trajectories):
        for order, mask in enumerate(masks):
            num = len(mask)
            samples.append(
                Sample(
                    tokens=tuple(range(num)),
                    origin=tuple(Origin.MODEL if c == "#" else Origin.ENVIRONMENT for c in mask),
                    loss_mask=tuple(c == "#" for c in mask),
                    logprobs=tuple(-1.0 if c == "#" else 0.0 for c in mask),
                    versions=tuple(0 if c == "#" else -1 for c in mask),
                    group=group,
                    trajectory=f"{group}/{i}",
                    order=order,
                    reward=reward,
                    valid=valid,
                )
            )
    return batch_of(samples)


def outputs(batch: TrainBatch, seed: int = 0) -> TokenOutputs:
    """Log-probs and entropies of the trained tokens, ready to be differentiated; 0 elsewhere, as a backend gives them."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, entropy = -torch.rand(2, batch.num_tokens, generator=generator) * 2
    mask = batch.loss_mask
    return TokenOutputs((logprobs * mask).requires_grad_(True), (-entropy * mask).requires_grad_(True))
