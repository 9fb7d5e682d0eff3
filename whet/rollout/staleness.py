"""No token older than the bound trains: what is over it loses its place in the loss mask, whatever scheduled it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whet.observe.metrics import Max, Mean, Metrics, Total
from whet.rollout.control import TooOld
from whet.types import UNSAMPLED, Sample


def bounded(samples: Sequence[Sample], version: int, max_staleness: int, too_old: TooOld) -> tuple[list[Sample], Metrics]:
    """Mask what may not be trained any more.

    A token's age is `version` less the version that sampled it. Tokens that no policy sampled have none.

    Args:
        samples: of a rollout.
        version: of the policy that is about to be trained.
        max_staleness: the oldest age that trains.
        too_old: `mask` takes out the tokens alone, `drop` whole samples that have one.

    Returns:
        The samples in their order, and metrics: the mean and the largest age of what trains, and how many tokens were taken out.
    """
    out: list[Sample] = []
    ages: list[int] = []
    num_masked = 0
    for sample in samples:
        trained = list(zip(sample.loss_mask, sample.versions, strict=True))
        old = [trains and v != UNSAMPLED and version - v > max_staleness for trains, v in trained]
        if any(old):
            whole = too_old == "drop"
            mask = tuple(trains and not (is_old or whole) for trains, is_old in zip(sample.loss_mask, old, strict=True))
            num_masked += sum(sample.loss_mask) - sum(mask)
            sample = replace(sample, loss_mask=mask)
        ages.extend(version - v for trains, v in zip(sample.loss_mask, sample.versions, strict=True) if trains and v != UNSAMPLED)
        out.append(sample)
    oldest = max(ages, default=0)
    assert oldest <= max_staleness, f"a token of age {oldest} was about to be trained"
    metrics: Metrics = {
        "staleness/mean": Mean(sum(ages), len(ages)),
        "staleness/max": Max(oldest),
        "staleness/masked_tokens": Total(num_masked),
    }
    return out, metrics
