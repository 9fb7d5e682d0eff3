"""The model that learns from data as they are, and the reference that it may be compared with."""

from __future__ import annotations

import torch

from whet.algo.base import LossFunction, Need
from whet.core.batch import TokenOutputs, TrainBatch
from whet.observe.meter import UPDATE, Meter
from whet.observe.metrics import Metrics, merge_metrics
from whet.train.learners import Models, Update, auxiliary_notes, optimizer_step


class SupervisedLearner:
    """Steps on batches, and measures of them, which the controller alone has.

    Args:
        models: the policy, and the reference whose log-probs the loss compares with, if it does.
        loss: the loss.
        meter: watches what the passes cost.
        measured_by: outputs of the policy that a measure is computed from.
    """

    def __init__(self, models: Models, loss: LossFunction, meter: Meter, measured_by: Need = Need.OLD_LOGPROBS) -> None:
        self.models = models
        self.policy, self._reference = models.policy, models.reference
        self.loss, self._meter, self._measured_by = loss, meter, measured_by

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
            found, metrics = optimizer_step(self.policy, batch, self.loss)
        return Update(merge_metrics(metrics, self._meter.take()), None, found.num_tokens)

    def measure(self, batch: TrainBatch) -> Metrics:
        """The loss's metrics of a batch that does not train."""
        if self._reference is not None:
            batch = self._reference.annotate(batch, Need.REF_LOGPROBS)
        batch = self.policy.annotate(batch, self._measured_by)
        nothing = torch.zeros(batch.num_tokens)
        logprobs = nothing if batch.old_logprobs is None else batch.old_logprobs
        return self.loss(batch, TokenOutputs(logprobs, nothing, scores=batch.scores)).metrics
