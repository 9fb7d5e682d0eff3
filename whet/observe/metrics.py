"""Metrics that know how to reduce themselves.

A metric is merged as data (sums and counts, extremes) and divided once, when it is read. So the value of a step does
not depend on how the step was cut into micro-batches, ranks or samples: there is no mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor

MetricValue = float | Tensor
"""A Python number or a 0-dim tensor. A tensor stays on its device until `.value` reads it."""


@dataclass(frozen=True, slots=True)
class Mean:
    """`sum / count`. For a rate, the count is the denominator: tokens over seconds."""

    sum: MetricValue
    count: MetricValue = 1

    def __post_init__(self) -> None:
        _settle(self)

    def merge(self, other: Metric) -> Mean:
        other = _same_kind(self, other)
        return Mean(self.sum + other.sum, self.count + other.count)

    @property
    def value(self) -> float | None:
        """None where nothing was counted: no data is not 0."""
        count = float(self.count)
        return None if count == 0 else float(self.sum) / count


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value. -inf is the maximum of nothing, so that a masked maximum needs no special case."""

    number: MetricValue

    def __post_init__(self) -> None:
        _settle(self)

    def merge(self, other: Metric) -> Max:
        return Max(_larger(self.number, _same_kind(self, other).number))

    @property
    def value(self) -> float | None:
        number = float(self.number)
        return None if number == -math.inf else number


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value. +inf is the minimum of nothing."""

    number: MetricValue

    def __post_init__(self) -> None:
        _settle(self)

    def merge(self, other: Metric) -> Min:
        return Min(-_larger(-self.number, -_same_kind(self, other).number))

    @property
    def value(self) -> float | None:
        number = float(self.number)
        return None if number == math.inf else number


@dataclass(frozen=True, slots=True)
class Total:
    """A sum: seconds, tokens, events."""

    number: MetricValue

    def __post_init__(self) -> None:
        _settle(self)

    def merge(self, other: Metric) -> Total:
        return Total(self.number + _same_kind(self, other).number)

    @property
    def value(self) -> float | None:
        return float(self.number)


@dataclass(frozen=True, slots=True)
class Last:
    """The latest value: a learning rate, a memory reading."""

    number: MetricValue

    def __post_init__(self) -> None:
        _settle(self)

    def merge(self, other: Metric) -> Last:
        return _same_kind(self, other)

    @property
    def value(self) -> float | None:
        return float(self.number)


Metric = Mean | Max | Min | Total | Last
Metrics = dict[str, Metric]
M = TypeVar("M", Mean, Max, Min, Total, Last)


def merge_metrics(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> Metrics:
    """Both sets of metrics in one; a name in both is merged, `b` being the later one.

    Raises ValueError where one name is two kinds of metric.
    """
    merged = dict(a)
    for name, metric in b.items():
        try:
            merged[name] = merged[name].merge(metric) if name in merged else metric
        except ValueError as error:
            raise ValueError(f"metric {name!r}: {error}") from error
    return merged


def flatten(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values as floats, without those that have no data. This is where a GPU is waited for, once per step."""
    values = {name: metric.value for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def distribution(name: str, values: Sequence[float]) -> Metrics:
    """`name/mean`, `name/min` and `name/max` of the values; without values all three are there and have no data."""
    highest, lowest = -math.inf, math.inf
    for value in values:
        highest, lowest = _larger(highest, value), -_larger(-lowest, -value)
    return {f"{name}/mean": Mean(sum(values), len(values)), f"{name}/min": Min(lowest), f"{name}/max": Max(highest)}


def _settle(metric: Metric) -> None:
    """Make a metric's tensors safe to keep and to add up, without waiting for their device."""
    for field in fields(metric):
        number = getattr(metric, field.name)
        if not isinstance(number, Tensor):
            continue
        if number.dim() != 0:
            kind, shape = type(metric).__name__, tuple(number.shape)
            raise ValueError(f"{kind}.{field.name} takes one number, not a tensor of shape {shape}: reduce it first")
        # Half-precision sums stall, small integers wrap and booleans add up to True; a graph would be kept alive.
        wide = torch.promote_types(number.dtype, torch.float32 if number.is_floating_point() else torch.int64)
        object.__setattr__(metric, field.name, number.detach().to(wide))


def _same_kind(metric: M, other: Metric) -> M:
    if not isinstance(other, type(metric)):
        raise ValueError(f"cannot merge a {type(metric).__name__} with a {type(other).__name__}")
    return other


def _larger(a: MetricValue, b: MetricValue) -> MetricValue:
    """The larger one, and NaN if either is: a NaN must not hide behind the order of its neighbours."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
    return a if a != a or a >= b else b
