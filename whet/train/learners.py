"""The models that take part in an update: the policy, and the frozen reference it may be measured against."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from whet.algo.base import Algorithm, LossFunction, Need
from whet.core.batch import TrainBatch
from whet.core.kl import k3
from whet.observe.metrics import Max, Mean, Metrics, merge_metrics
from whet.train.base import COMPUTED, Annotator, Backend, Backward, NonFinite
from whet.train.batching import BatchPlan, steps_of
from whet.types import Progress


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did."""

    metrics: Metrics
    train_logprobs: Tensor | None
    """The trainer's log-probs of the trained tokens under the policy that the update began with, 0 elsewhere. [T] float32

    None where they were never computed for the whole batch: nothing trained, or a rollout fed several steps to an algorithm that
    did not ask for them."""
    num_tokens: int
    """Tokens that went through the model in forward and backward passes."""


def check_needs(name: str, algorithm: Algorithm) -> None:
    """Refuse an algorithm that needs what nothing fills in yet.

    Raises:
        ValueError: with what is missing.
    """
    if missing := sorted(algorithm.needs - COMPUTED):
        remedy = "leave distill_coef at 0, or choose another algorithm" if Need.TEACHER_LOGPROBS in missing else "choose another algorithm"
        raise ValueError(f"algo.name={name} needs {', '.join(missing)}, which whet cannot compute yet; {remedy}")


class Learners:
    """Annotation and updates over a rollout's batch.

    Args:
        policy: the backend that trains.
        reference: a frozen model for `Need.REF_LOGPROBS`.
        algorithm: credit and loss.
        plan: batch arithmetic.
        seed: of the shuffles into optimizer steps.
    """

    def __init__(
        self, policy: Backend, reference: Annotator | None, algorithm: Algorithm, plan: BatchPlan, seed: int
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.algorithm = algorithm
        self.plan = plan
        self._seed = seed

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill the columns that the algorithm needs; `check_needs` has seen that they can be."""
        for need in sorted(self.algorithm.needs):
            if need is Need.REF_LOGPROBS:
                assert self.reference is not None, "build made no reference model"
                batch = self.reference.annotate(batch, need)
            else:
                batch = self.policy.annotate(batch, need)
        return batch

    def update(self, batch: TrainBatch, progress: Progress) -> Update:
        """Every optimizer step that the rollout feeds. Weights are global to each step; an untrainable step is skipped.

        `progress.optimizer_step` moves with every step taken. The difference from the engine's log-probs is measured before
        the first one: on the whole batch where the old log-probs are there, else on that step.
        """
        metrics: Metrics = {}
        num_tokens = num_steps = 0
        before = batch.old_logprobs if Need.OLD_LOGPROBS in self.algorithm.needs else None
        if before is not None:
            metrics = mismatch(batch, before)
        for step in steps_of(batch, self.plan, self._seed * 1_000_003 + progress.rollout_id):
            if not bool(step.loss_mask.any()):
                continue
            step = self.algorithm.prepare(step.with_(weights=self.algorithm.reducer(step)))
            found, stepped = optimizer_step(self.policy, step, self.algorithm.loss, entropy_grad=self.algorithm.entropy_grad)
            if before is None and num_steps == 0:
                metrics = mismatch(step, found.logprobs)
                before = found.logprobs if self.plan.optimizer_steps == 1 else None
            metrics = merge_metrics(metrics, stepped)
            metrics = merge_metrics(metrics, {"policy/loss": Mean(found.loss, 1)})
            progress.optimizer_step += 1
            num_steps += 1
            num_tokens += found.num_tokens
        return Update(metrics, before, num_tokens)


def optimizer_step(
    backend: Backend, batch: TrainBatch, loss: LossFunction, *, entropy_grad: bool = False
) -> tuple[Backward, Metrics]:
    """Forward, backward, step: what the passes found, and their metrics with the step's.

    Raises:
        NonFinite: with the batch that the step was to learn from.
    """
    try:
        found = backend.forward_backward(batch, loss, entropy_grad=entropy_grad)
        return found, merge_metrics(found.metrics, backend.optim_step())
    except NonFinite as error:
        error.batch = batch
        raise


def mismatch(batch: TrainBatch, train_logprobs: Tensor) -> Metrics:
    """How far the trainer's log-probs are from the engine's over the trained tokens: |difference|, KL(rollout || train)."""
    mask = batch.loss_mask
    if not bool(mask.any()):
        return {}
    rollout, train = batch.rollout_logprobs[mask].double(), train_logprobs[mask].double()
    difference, kl, count = train - rollout, k3(rollout, train), len(rollout)
    return {
        "mismatch/logprob_mean": Mean(difference.abs().sum(), count),
        "mismatch/logprob_max": Max(difference.abs().max()),
        "mismatch/kl": Mean(kl.sum(), count),
    }
