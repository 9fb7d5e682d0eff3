"""Batches for the tests of the core, from a short description of each sample."""

from __future__ import annotations

from whet.core.batch import TrainBatch, batch_of
from whet.types import Origin, Sample


def sample(mask: str, *, group="g", trajectory="t", reward=0.0, valid=True, order=0, first=0) -> Sample:
    """`mask` has a `#` for each token that trains and a `.` for each that does not; token ids count up from `first`."""
    num = len(mask)
    return Sample(
        tokens=tuple(range(first, first + num)),
        origin=tuple(Origin.MODEL if c == "#" else Origin.PROMPT for c in mask),
        loss_mask=tuple(c == "#" for c in mask),
        logprobs=tuple(-0.5 * i if c == "#" else 0.0 for i, c in enumerate(mask)),
        versions=tuple(3 if c == "#" else -1 for c in mask),
        group=group,
        trajectory=trajectory,
        order=order,
        reward=reward,
        valid=valid,
    )


def batch(*samples: Sample) -> TrainBatch:
    return batch_of(samples)
