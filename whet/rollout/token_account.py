"""Account of every sampled token: what was sampled is trained, dropped for a named reason, or held for a later rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from whet.observe.metrics import Metric, Metrics, Total
from whet.types import Group, Origin, Sample
from whet.types.columns import in_step

SAMPLED, CARRIED, TRAINED, HELD = "tokens/sampled", "tokens/carried", "tokens/trained", "tokens/held"
DROPPED = "tokens/dropped"
UNACCOUNTED = "tokens/unaccounted"
UNTRAINED = "untrained"
"""Reason for tokens of agents and calls that do not train."""


def num_trained(samples: Iterable[Sample]) -> int:
    """Sampled tokens that count in the loss."""
    return sum(
        n
        for sample in samples
        if sample.valid
        for origin, trains, n in in_step(sample.origin, sample.loss_mask)
        if trains and origin is Origin.MODEL
    )


def dropped_of_taken(groups: Sequence[Group]) -> Counter[str]:
    """Tokens of the groups that train which make no sample that could: by reason, `failed` (trajectories), `greedy` (baselines),
    `no_baseline` (siblings of a greedy trajectory that failed), `untrained`."""
    found: Counter[str] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            found[UNTRAINED] += trajectory.num_tokens_untrained
            if not trajectory.outcome.valid or trajectory.rewards is None:
                found["failed"] += trajectory.num_tokens_sampled
            elif group.baseline is not None and (not group.baseline.outcome.valid or group.baseline.rewards is None):
                found["no_baseline"] += trajectory.num_tokens_sampled
        if group.baseline is not None:
            found["greedy"] += group.baseline.num_tokens_played
    return found


def dropped_metrics(dropped: Mapping[str, int]) -> Metrics:
    """The metrics of tokens that were dropped, by reason."""
    return {f"{DROPPED}/{reason}": Total(count) for reason, count in sorted(dropped.items()) if count}


def num_dropped(metrics: Mapping[str, Metric]) -> int:
    """Tokens that were dropped, for all reasons together."""
    return round(sum(metric.value or 0.0 for name, metric in metrics.items() if name.startswith(f"{DROPPED}/")))


def unaccounted(metrics: Mapping[str, Metric]) -> int:
    """Tokens that were sampled or carried over from the last rollout, and neither trained nor dropped nor held. 0, or whet has a fault."""

    there = {name: metric.value or 0.0 for name in (SAMPLED, CARRIED, TRAINED, HELD) if (metric := metrics.get(name)) is not None}
    return round(there.get(SAMPLED, 0) + there.get(CARRIED, 0) - there.get(TRAINED, 0) - there.get(HELD, 0)) - num_dropped(metrics)
