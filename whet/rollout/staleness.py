"""Staleness bound: no token older than the bound trains. Older tokens lose their place in the loss
mask, for every scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from whet.observe.metrics import Max, Mean, Metrics, Total
from whet.rollout.control import TooOld
from whet.types import UNSAMPLED, Sample
from whet.types.columns import Runs, in_step, num_true


def bounded(samples: Sequence[Sample], version: int, max_staleness: int, too_old: TooOld) -> tuple[list[Sample], Metrics]:
    """Mask what may not be trained any more.

    A token's age is `version` less the version that sampled it. Tokens that no policy sampled have none.

    Args:
        samples: samples of a rollout.
        version: version of the policy that is about to be trained.
        max_staleness: the oldest age that trains.
        too_old: `mask` takes out the tokens alone, `drop` whole samples that have one, `drop_group` all samples of their groups.

    Returns:
        The samples in their order, and metrics: the mean and the largest age of what trains, and how many tokens were taken out.
    """
    out: list[Sample] = []
    ages: Counter[int] = Counter()
    num_masked = 0
    ages_of = [_ages(sample, version) for sample in samples]
    is_old = [any(age > max_staleness for age in found) for found in ages_of]
    dropped = {sample.group for sample, old in zip(samples, is_old, strict=True) if old and too_old == "drop_group"}
    for sample, found, old in zip(samples, ages_of, is_old, strict=True):
        if old or sample.group in dropped:
            whole = too_old != "mask"
            mask = Runs.from_runs(
                (trains and not (whole or (v != UNSAMPLED and version - v > max_staleness)), n)
                for trains, v, n in in_step(sample.loss_mask, sample.versions)
            )
            num_masked += num_true(sample.loss_mask) - num_true(mask)
            sample = replace(sample, loss_mask=mask)
            found = _ages(sample, version)
        ages.update(found)
        out.append(sample)
    oldest = max(ages, default=0)
    assert oldest <= max_staleness, f"a token of age {oldest} was about to be trained"
    metrics: Metrics = {
        "staleness/mean": Mean(sum(age * count for age, count in ages.items()), ages.total()),
        "staleness/max": Max(oldest),
        "staleness/masked_tokens": Total(num_masked),
    }
    return out, metrics


def _ages(sample: Sample, version: int) -> Counter[int]:
    """Number of trained tokens by age."""
    counts: Counter[int] = Counter()
    for trains, v, n in in_step(sample.loss_mask, sample.versions):
        if trains and v != UNSAMPLED:
            counts[version - v] += n
    return counts
