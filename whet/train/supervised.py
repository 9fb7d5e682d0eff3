"""The model that learns from data as they are, and the reference that it may be compared with; the same in every process of a job."""

from __future__ import annotations

import torch

from whet.algo.base import LossFunction, Need
from whet.core.batch import TokenOutputs, TrainBatch
from whet.observe.meter import UPDATE, Meter
from whet.observe.metrics import Metrics, merge_metrics
from whet.train.base import Annotator, Backend, Mirror
from whet.train.lead import ALONE, LEARNERS, CollectiveCall, Lead
from whet.train.learners import Update, notes_beside, optimizer_step


class SupervisedLearner:
    """Steps on batches, and measures of them.

    Args:
        policy: the backend that trains.
        loss: the loss.
        meter: watches what the passes cost.
        measured_by: outputs of the policy that a measure is computed from.
        reference: a frozen model whose log-probs the loss compares with; None: it does not.
        kept: the reference again, if checkpoints have to hold it.
        lead: tells the other processes of the job what all of them do.
    """

    def __init__(
        self,
        policy: Backend,
        loss: LossFunction,
        meter: Meter,
        measured_by: Need = Need.OLD_LOGPROBS,
        reference: Annotator | None = None,
        kept: Mirror | None = None,
        lead: Lead = ALONE,
    ) -> None:
        self._loss, self._meter, self._measured_by, self._reference, self._lead = loss, meter, measured_by, reference, lead
        self.policy = lead.led("policy", policy)
        self._policy, self._kept = policy, kept

    @property
    def beside(self) -> dict[str, Backend]:
        """Models other than the policy that a checkpoint holds, by name."""
        return {} if self._kept is None else {"reference": self._lead.led("reference", self._kept)}

    def renew_reference(self) -> None:
        """Have the reference that checkpoints hold become a copy of the policy."""
        assert self._kept is not None, "the reference is what a folder has"
        with self._lead.tell(CollectiveCall(LEARNERS, "renew_reference")):
            self._kept.take_weights(self._policy.named_weights())

    @property
    def notes(self) -> list[str]:
        """Remarks on the models for the user who starts a run."""
        return [*self._policy.notes, *notes_beside({"reference": self._reference})]

    def update(self, batch: TrainBatch) -> Update:
        """One optimizer step on a batch whose weights are assigned."""
        with self._lead.tell(CollectiveCall(LEARNERS, "update", (batch,))):
            if self._reference is not None:
                with self._meter.phase(Need.REF_LOGPROBS.value, self._reference):
                    batch = self._reference.annotate(batch, Need.REF_LOGPROBS)
            with self._meter.phase(UPDATE, self._policy):
                found, metrics = optimizer_step(self._policy, batch, self._loss)
            return Update(merge_metrics(metrics, self._meter.take()), None, found.num_tokens)

    def measure(self, batch: TrainBatch) -> Metrics:
        """The loss's metrics of a batch that does not train."""
        with self._lead.tell(CollectiveCall(LEARNERS, "measure", (batch,))):
            if self._reference is not None:
                batch = self._reference.annotate(batch, Need.REF_LOGPROBS)
            batch = self._policy.annotate(batch, self._measured_by)
            nothing = torch.zeros(batch.num_tokens)
            logprobs = nothing if batch.old_logprobs is None else batch.old_logprobs
            return self._loss(batch, TokenOutputs(logprobs, nothing, scores=batch.scores)).metrics
