"""From a rollout's groups to the samples that train: what was sampled, what a user's function changes about it, what is young enough."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

from whet.config import Hook
from whet.observe.metrics import Metrics, Total
from whet.rollout.control import TooOld
from whet.rollout.samples import samples_of_groups
from whet.rollout.staleness import bounded
from whet.rollout.token_account import TRAINED, dropped_metrics, dropped_of_taken, num_trained
from whet.train.batching import TrainOn
from whet.types import Group, Sample
from whet.types.columns import in_step, num_true

CHANGED = frozenset({"loss_mask", "reward", "token_rewards", "baseline", "valid"})
"""Fields of a sample that a user's function may change. All others hold what was sampled."""
OF_TRAJECTORY = ("reward", "baseline", "valid")
"""Fields that all samples of one trajectory share, or of one role in it."""

Key = tuple[str, int]
"""A sample's trajectory and its place in there."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The rule that turns the groups of a rollout into training samples."""

    train_on: TrainOn = "model"
    max_staleness: int = 0
    too_old: TooOld = "mask"
    process: Hook | None = None
    """`batch.process`: `(samples, groups) -> samples`."""

    def samples(self, groups: Sequence[Group], version: int) -> tuple[list[Sample], Metrics]:
        """The samples of `groups`, in order, and metrics of what does not train; `version` is the policy's that is about to be trained.

        Raises:
            HookFailed: `batch.process` raised, or returned what is no sample of the rollout.
        """
        samples = samples_of_groups(groups, self.train_on)
        num = [num_trained(samples)]
        found: Metrics = {}
        if self.process is not None:
            samples, found = processed(self.process, samples, groups)
        num.append(num_trained(samples))
        samples, aged = bounded(samples, version, self.max_staleness, self.too_old)
        num.append(num_trained(samples))
        dropped = dropped_of_taken(groups) + Counter(process=num[0] - num[1], stale=num[1] - num[2])
        return samples, {**found, **aged, TRAINED: Total(num[2]), **dropped_metrics(dropped)}


def processed(hook: Hook, samples: Sequence[Sample], groups: Sequence[Group]) -> tuple[list[Sample], Metrics]:
    """The samples of a rollout after a user's function.

    Args:
        hook: returns samples that it was given, as they were or with another `loss_mask`, `reward`, `token_rewards`, `baseline` or
            `valid`, in any order. One that it leaves out is not valid any more: it neither trains nor counts in its group's statistics.
        samples: samples of the rollout.
        groups: groups of the rollout.

    Returns:
        As many samples as there were, in their order, and metrics: `process/left_out` samples, `process/masked_tokens` that would have
        trained otherwise.

    Raises:
        HookFailed: it raised, or returned something else.
    """
    returned = hook(list(samples), list(groups))
    if not isinstance(returned, Sequence) or not all(isinstance(sample, Sample) for sample in returned):
        raise hook.refused(f"returned {_shown(returned)}; return a list of the samples that it was given")
    given = {_key(sample): sample for sample in samples}
    found: dict[Key, Sample] = {}
    for sample in returned:
        before = given.get(_key(sample))
        if before is None:
            raise hook.refused(f"returned a sample of trajectory {sample.trajectory!r} (order {sample.order}), which the rollout has not")
        if _key(sample) in found:
            raise hook.refused(f"returned the sample {sample.order} of trajectory {sample.trajectory!r} twice")
        _check(hook, before, sample)
        found[_key(sample)] = sample
    out = [found.get(_key(sample)) or replace(sample, valid=False) for sample in samples]
    _check_trajectories(hook, out)
    masked = sum(_num_trained(sample) for sample in samples) - sum(_num_trained(sample) for sample in out)
    return out, {"process/left_out": Total(len(samples) - len(found)), "process/masked_tokens": Total(masked)}


def _check(hook: Hook, before: Sample, after: Sample) -> None:
    """See that one sample holds what was sampled, and numbers."""
    what = f"the sample {before.order} of trajectory {before.trajectory!r}"
    for name in (item.name for item in fields(Sample) if item.name not in CHANGED):
        old, new = getattr(before, name), getattr(after, name)
        if old is not new and old != new:
            raise hook.refused(f"changed {name} of {what}; it may change {', '.join(sorted(CHANGED))}: the rest is what was sampled")
    if any(now and not then for then, now, _ in in_step(before.loss_mask, after.loss_mask)):
        raise hook.refused(f"set loss_mask of {what} where it was not set; it may only take tokens out (batch.train_on adds some)")
    if after.valid and not before.valid:
        raise hook.refused(f"made {what} valid; its trajectory failed, so it has no reward")
    numbers = {"reward": (after.reward,), "token_rewards": after.token_rewards or (), "baseline": (after.baseline or 0.0,)}
    for name, values in numbers.items():
        if not all(isinstance(x, Real) and math.isfinite(x) for x in values):
            raise hook.refused(f"gave {what} the {name} {_shown(getattr(after, name))}; it must be finite")
    if (before.baseline is None) != (after.baseline is None):
        raise hook.refused(f"gave or took the baseline of {what}; it may only change one that there is")


def _check_trajectories(hook: Hook, samples: Sequence[Sample]) -> None:
    """See that the samples of a trajectory agree about what it scored."""
    first: dict[tuple[str, str], Sample] = {}
    for sample in samples:
        other = first.setdefault((sample.trajectory, sample.role), sample)
        for name in OF_TRAJECTORY:
            if getattr(sample, name) != getattr(other, name):
                raise hook.refused(
                    f"left the samples of trajectory {sample.trajectory!r} with different {name}; return all of them alike, or none (clear "
                    "loss_mask to take one of them out of the loss)"
                )


def _key(sample: Sample) -> Key:
    return sample.trajectory, sample.order


def _num_trained(sample: Sample) -> int:
    return num_true(sample.loss_mask) if sample.valid else 0


def _shown(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
