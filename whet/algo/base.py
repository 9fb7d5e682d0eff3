"""The algorithm seam: what it needs to know of each token, how credit is assigned, and what the loss is.

An algorithm sees columns in sample space (`core.batch`), never a layout, a rank or a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from torch import Tensor

from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.weights import Reducer
from whet.observe.metrics import Metrics


class Need(StrEnum):
    """Columns that must be annotated on the batch before credit is assigned."""

    OLD_LOGPROBS = "old_logprobs"
    REF_LOGPROBS = "ref_logprobs"
    TEACHER_LOGPROBS = "teacher_logprobs"
    SQUARED_PROBS = "squared_probs"
    """With the old log-probs, of the same distributions."""
    VALUES = "values"
    """A critic's estimates before each token; with them come its `scores`, the estimates after it."""
    SCORES = "scores"
    """A reward model's, of each token itself."""
    BASELINE = "baseline"
    """Comes with the rollout: what the greedy trajectory of each task scored."""


@dataclass(frozen=True, slots=True)
class LossDetail:
    """Numbers of a policy loss for each token, without gradient. Each [T]."""

    old_logprobs: Tensor
    """The log-probs that the ratio is over."""
    ratio: Tensor
    """pi / pi_old as the loss sees it."""
    clip: Tensor
    """`core.choices.Clip` of each token. int8"""
    correction: Tensor | None
    """Importance weights that the loss was multiplied by. None: there are none."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """One term per token, reduced by the caller as `sum(weights * terms)`, and metrics that reduce themselves."""

    terms: Tensor
    """[T]"""
    metrics: Metrics
    detail: Callable[[], LossDetail] | None = None
    """Makes the detail of these terms, for a caller that records it. None: this loss has none."""


LossFunction = Callable[[TrainBatch, TokenOutputs], LossTerms]


@runtime_checkable
class Algorithm(Protocol):
    """Which credit, which loss, and what they need."""

    @property
    def needs(self) -> frozenset[Need]: ...

    @property
    def entropy_grad(self) -> bool:
        """True if the loss differentiates the entropy."""
        ...

    @property
    def reducer(self) -> Reducer:
        """Weights of one optimizer step."""
        ...

    def prepare(self, batch: TrainBatch) -> TrainBatch:
        """Step-wide statistics, without gradient: called once per optimizer step, on the whole of it."""
        ...

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Advantages (and returns), on whole groups."""
        ...

    def loss(self, batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        """Terms per token of a micro-batch."""
        ...


@runtime_checkable
class LearnsValues(Protocol):
    """An algorithm that needs values, and so a loss for its critic."""

    def value_loss(self, batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        """The critic's terms per token of a micro-batch, from `out.values`."""
        ...


@runtime_checkable
class KnowsGradients(Protocol):
    """An algorithm that knows before the pass which tokens will have no gradient."""

    def has_gradient(self, batch: TrainBatch) -> Tensor:
        """Trained tokens of a prepared step whose term may have a gradient. A sample without any is not computed. [T] bool"""
        ...


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Facts about the optimizer steps of one rollout that an algorithm may need."""

    num_steps: int
    """Optimizer steps per rollout, all epochs counted. 1: every step is on-policy."""
    samples_per_prompt: int | None = None
    """Trajectories of each prompt, where they are known."""
    max_tokens: int | None = None
    """The token limit of a trajectory (`rollout.max_tokens`), where it is known."""
