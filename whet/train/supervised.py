"""The model that learns from data as they are, and the reference that it may be compared with; the same in every process of a job."""

from __future__ import annotations

import torch

from whet.algo.base import LossFunction, Need
from whet.core.batch import TokenOutputs, TrainBatch
from whet.observe.meter import UPDATE, Meter
from whet.observe.metrics import Metrics, merge_metrics
from whet.train.base import Annotator, Backend, Mirror
from whet.train.learners import Update, auxiliary_notes, optimizer_step


class SupervisedLearner:
    """Steps on batches, and measures of them. All ranks of a job make each call.

    Args:
        policy: the backend that trains.
        loss: the loss.
        meter: watches what the passes cost.
        measured_by: outputs of the policy that a measure is computed from.
        reference: a frozen model whose log-probs the loss compares with; None: it does not.
        kept: the reference again, if checkpoints have to hold it.
    """

    def __init__(
        self,
        policy: Backend,
        loss: LossFunction,
        meter: Meter,
        measured_by: Need = Need.OLD_LOGPROBS,
        reference: Annotator | None = None,
        kept: Mirror | None = None,
    ) -> None:
        self.policy = policy
        self._loss, self._meter, self._measured_by, self._reference, self._kept = loss, meter, measured_by, reference, kept

    @property
    def auxiliary(self) -> dict[str, Backend]:
        """Models other than the policy that a checkpoint holds, by name."""
        return {} if self._kept is None else {"reference": self._kept}

    def renew_reference(self) -> None:
        """Have the reference that checkpoints hold become a copy of the policy."""
        assert self._kept is not None, "the reference is what a folder has"
        self._kept.take_weights(self.policy.named_weights())

    @property
    def notes(self) -> list[str]:
        """Remarks on the models for the user who starts a run."""
        return [*self.policy.notes, *auxiliary_notes({"reference": self._reference})]

    def update(self, batch: TrainBatch) -> Update:
        """One optimizer step on a batch whose weights are assigned."""
        if self._reference is not None:
            with self._meter.phase(Need.REF_LOGPROBS.value, self._reference):
                batch = self._reference.annotate(batch, Need.REF_LOGPROBS)
        with self._meter.phase(UPDATE, self.policy):
            found, metrics = optimizer_step(self.policy, batch, self._loss)
        return Update(merge_metrics(metrics, self._meter.take()), None, found.num_tokens)

    def measure(self, batch: TrainBatch) -> Metrics:
        """The loss's metrics of a batch that does not train."""
        if self._reference is not None:
            batch = self._reference.annotate(batch, Need.REF_LOGPROBS)
        batch = self.policy.annotate(batch, self._measured_by)
        nothing = torch.zeros(batch.num_tokens)
        logprobs = nothing if batch.old_logprobs is None else batch.old_logprobs
        return self._loss(batch, TokenOutputs(logprobs, nothing, scores=batch.scores)).metrics
