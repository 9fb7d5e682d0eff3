"""The models that take part in an update: policy and critic learn, reference and teacher are asked. Each is a `Backend`."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from whet.algo.base import Algorithm, KnowsGradients, LossFunction, Need
from whet.core.batch import TrainBatch, as_list, stretches
from whet.core.kl import k3
from whet.core.nonfinite import Learner, NonFinite
from whet.core.segments import per_sample_count
from whet.observe.meter import UPDATE, Devices, Meter
from whet.observe.metrics import Max, Mean, Metrics, merge_metrics
from whet.train.base import Annotator, Backend, Backward, Mirror
from whet.train.batching import BatchPlan
from whet.train.controller import Controller
from whet.train.critic import fit_of, named_for_critic
from whet.train.remote_teacher import RemoteTeacher
from whet.train.routing import replay_metrics
from whet.train.token_uses import TokenUses, UseTable
from whet.types import Origin, Progress

M = TypeVar("M", bound=Annotator)


@dataclass(frozen=True, slots=True)
class Update:
    """Result of an update."""

    metrics: Metrics
    train_logprobs: Tensor | None
    """The trainer's log-probs of the trained tokens under the policy that the update began with, NaN where they were not computed, 0 in
    tokens that don't train. [T] float32

    None where they were never computed for the whole batch: nothing trained, or a rollout fed several steps to an algorithm that
    did not ask for them."""
    num_tokens: int
    """Tokens that went through the model in forward and backward passes."""
    uses: TokenUses | None = None
    """Numbers of each token from the optimizer steps. None where nobody asked, or no step was taken."""


@dataclass(frozen=True, slots=True)
class Critic:
    """The model that learns values."""

    backend: Backend
    loss: LossFunction
    """The algorithm's `value_loss`."""
    warmup_rollouts: int = 0
    """Number of rollouts at the start in which only the critic learns."""


@dataclass(frozen=True, slots=True)
class Refresh:
    """A reference whose weights no folder has, so that checkpoints hold it."""

    reference: Mirror
    every: int | None
    """Number of rollouts after which the reference becomes a copy of the policy, each time; None:
    never."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models that take part in an update."""

    policy: Backend
    """The one that trains."""
    reference: Annotator | None = None
    """A frozen model for `Need.REF_LOGPROBS`."""
    refresh: Refresh | None = None
    """The reference, where checkpoints hold it, and when it becomes a copy of the policy."""
    teacher: Annotator | None = None
    """A frozen model for `Need.TEACHER_LOGPROBS`."""
    critic: Critic | None = None
    """The model for `Need.VALUES`."""

    @property
    def by_name(self) -> dict[str, Annotator]:
        """The models by their names in calls."""
        critic = None if self.critic is None else self.critic.backend
        named = {"policy": self.policy, "critic": critic, "reference": self.reference, "teacher": self.teacher}
        return {name: model for name, model in named.items() if model is not None}

    @property
    def auxiliary(self) -> dict[str, Backend]:
        """Models other than the policy that a checkpoint holds, by name: those whose weights no folder
        has."""
        critic = {"critic": self.critic.backend} if self.critic is not None else {}
        reference = {"reference": self.refresh.reference} if self.refresh is not None else {}
        return {**critic, **reference}

    def renew_reference(self) -> None:
        """Have the reference that checkpoints hold become a copy of the policy."""
        assert self.refresh is not None, "the reference is what a folder has"
        self.refresh.reference.copy_weights(self.policy)

    def controlled(self, controller: Controller) -> Models:
        """The models of the controller, each of whose calls all ranks make."""

        def of(name: str, model: M) -> M:
            return controller.control(name, model, Mirror)

        reference = None if self.reference is None else of("reference", self.reference)
        refresh, teacher, critic = self.refresh, self.teacher, self.critic
        return Models(
            of("policy", self.policy),
            reference,
            None if refresh is None else replace(refresh, reference=of("reference", refresh.reference)),
            teacher if teacher is None or isinstance(teacher, RemoteTeacher) else of("teacher", teacher),
            None if critic is None else replace(critic, backend=of("critic", critic.backend)),
        )


class Learners:
    """Annotation and updates over a rollout's batch, which the controller alone has.

    Args:
        models: those that the algorithm needs.
        algorithm: credit and loss.
        plan: batch arithmetic.
        seed: seed of the shuffles into optimizer steps.
        gives_back: True if memory that an update leaves unused is for other processes on the device.
        meter: watches what the passes cost.
        replays_rollout: True if the policy replays the engine's experts.
    """

    def __init__(
        self,
        models: Models,
        algorithm: Algorithm,
        plan: BatchPlan,
        seed: int,
        *,
        gives_back: bool = False,
        meter: Meter | None = None,
        replays_rollout: bool = False,
    ) -> None:
        self.models = models
        self.policy, self.critic = models.policy, models.critic
        self.reference, self.teacher = models.reference, models.teacher
        self.algorithm = algorithm
        self.plan = plan
        self._seed = seed
        self._refresh = models.refresh
        self._gives_back = gives_back
        self._meter = meter or Meter(Devices())
        self._replays_rollout = replays_rollout

    @property
    def notes(self) -> list[str]:
        """Remarks on the models for the user who starts a run, with the name of each model other than
        the policy."""
        critic = self.critic.backend if self.critic is not None else None
        return [*self.policy.notes, *auxiliary_notes({"critic": critic, "reference": self.reference, "teacher": self.teacher})]

    def learner(self, name: Learner) -> Backend:
        """A model that learns."""
        if name == "policy":
            return self.policy
        assert self.critic is not None
        return self.critic.backend

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill the columns that the algorithm needs; the baseline comes with the rollout."""
        others = {
            Need.REF_LOGPROBS: self.reference,
            Need.TEACHER_LOGPROBS: self.teacher,
            Need.VALUES: self.critic.backend if self.critic is not None else None,
        }
        for need in sorted(self.algorithm.needs - {Need.BASELINE}):
            backend = others.get(need, self.policy)
            assert backend is not None, f"build made nothing that computes {need}"
            with self._meter.phase(need.value, backend):
                batch = backend.annotate(batch, need)
        return batch

    def update(self, batch: TrainBatch, progress: Progress, *, per_token: bool = False) -> Update:
        """Every optimizer step that the rollout feeds, the critic's first. A critic that is warming up learns alone.

        With `per_token` the result has the numbers of each token from the policy's steps.
        """
        batch = batch.with_(td_errors=None, kl_rewards=None)  # they are for the records
        before = batch.old_logprobs if Need.OLD_LOGPROBS in self.algorithm.needs else None
        done = Update({} if before is None else mismatch(batch, before), before, 0)
        if self._replays_rollout and batch.routes is not None:
            done = replace(done, metrics=merge_metrics(done.metrics, replay_metrics(batch, self.policy)))
        warmup = 0
        if self.critic is not None:
            warmup = self.critic.warmup_rollouts
            done = self._update_critic(self.critic, batch, progress, done)
        if progress.rollout_id >= warmup:
            done = self._update_policy(batch, progress, done, UseTable(batch) if per_token else None)
        refresh = self._refresh
        if refresh is not None and refresh.every is not None and (progress.rollout_id + 1) % refresh.every == 0:
            refresh.reference.copy_weights(self.policy)
        if self._gives_back:
            self.policy.release_memory()
        return replace(done, metrics=merge_metrics(done.metrics, self._meter.take()))

    def _computed(self, step: TrainBatch) -> list[int] | None:
        """Samples of a prepared step that are computed: those with a gradient, at least one. None: all."""
        if not self.plan.skip_zero_advantage or not isinstance(self.algorithm, KnowsGradients):
            return None
        trained, needed = per_sample_count(step) > 0, per_sample_count(step, self.algorithm.has_gradient(step)) > 0
        if torch.equal(trained, needed):
            return None
        found = needed.nonzero().squeeze(-1)
        return as_list(found) if len(found) else [int(torch.where(trained, step.lengths, step.num_tokens + 1).argmin())]

    def _steps(self, batch: TrainBatch, progress: Progress) -> Iterator[tuple[list[int], TrainBatch]]:
        """The rollout's optimizer steps, the same for policy and critic, each after the places of its samples in the rollout. Weights are
        global to each; an untrainable one is skipped."""
        for samples, step in numbered_steps(batch, self.plan, self._seed * 1_000_003 + progress.rollout_id):
            if bool(step.loss_mask.any()):
                yield samples, step.with_(weights=self.algorithm.reducer(step))

    def _update_critic(self, critic: Critic, batch: TrainBatch, progress: Progress, done: Update) -> Update:
        """The critic learns the returns; they and the old values stay what they were before its first step."""
        metrics, num_tokens = fit_of(batch), done.num_tokens
        for _, step in self._steps(batch, progress):
            with self._meter.phase("critic", critic.backend):
                found, stepped = optimizer_step(critic.backend, step, critic.loss, learner="critic")
            metrics = merge_metrics(metrics, {**named_for_critic(stepped), "critic/loss": Mean(found.loss, 1)})
            num_tokens += found.num_tokens
        return replace(done, metrics=merge_metrics(done.metrics, metrics), num_tokens=num_tokens)

    def _update_policy(self, batch: TrainBatch, progress: Progress, done: Update, uses: UseTable | None) -> Update:
        """The policy's steps; `progress.optimizer_step` moves with every one.

        The difference from the engine's log-probs is measured before the first: on the whole batch where the old log-probs are there,
        else on that step.
        """
        metrics, before, num_tokens = done.metrics, done.train_logprobs, done.num_tokens
        for i, (samples, step) in enumerate(self._steps(batch, progress)):
            step = self.algorithm.prepare(step)
            computed = self._computed(step)
            part = step if computed is None else step.select(computed)
            with self._meter.phase(UPDATE, self.policy):
                loss, entropy_grad = self.algorithm.loss, self.algorithm.entropy_grad
                found, stepped = optimizer_step(self.policy, part, loss, entropy_grad=entropy_grad, per_token=uses is not None)
            if uses is not None and found.tokens is not None:
                uses.add(samples, step, computed, found.tokens)
            if done.train_logprobs is None and i == 0:
                metrics = merge_metrics(metrics, mismatch(part, found.logprobs))
                if self.plan.optimizer_steps == 1:
                    before = found.logprobs if computed is None else _spread(found.logprobs, step, computed)
            trained, left = (int(batch.loss_mask.sum()) for batch in (step, part))
            stepped["train/skipped"] = Mean(trained - left, trained)
            metrics = merge_metrics(metrics, {**stepped, "policy/loss": Mean(found.loss, 1)})
            progress.optimizer_step += 1
            num_tokens += found.num_tokens
        return Update(metrics, before, num_tokens, None if uses is None else uses.uses())


def auxiliary_notes(models: Mapping[str, Annotator | None]) -> list[str]:
    """Remarks on models other than the policy, each with its model's name."""
    return [f"{name}: {note}" for name, model in models.items() if model is not None for note in model.notes]


def optimizer_step(
    backend: Backend,
    batch: TrainBatch,
    loss: LossFunction,
    *,
    entropy_grad: bool = False,
    per_token: bool = False,
    learner: Learner = "policy",
) -> tuple[Backward, Metrics]:
    """Forward, backward, step: what the passes found, and their metrics with the step's.

    Raises:
        NonFinite: with the batch that the step was to learn from, and whose step it was.
    """
    try:
        found = backend.forward_backward(batch, loss, entropy_grad=entropy_grad, per_token=per_token)
        return found, merge_metrics(found.metrics, backend.optim_step())
    except NonFinite as error:
        error.batch, error.learner = batch, learner
        raise


def mismatch(batch: TrainBatch, train_logprobs: Tensor) -> Metrics:
    """Distance of the trainer's log-probs from the engine's, over the trained tokens that it sampled:
    |difference|, KL(rollout || train)."""
    mask = batch.loss_mask & (batch.origin == int(Origin.MODEL))
    if not bool(mask.any()):
        return {}
    rollout, train = batch.rollout_logprobs[mask].double(), train_logprobs[mask].double()
    difference, kl, count = train - rollout, k3(rollout, train), len(rollout)
    return {
        "mismatch/logprob_mean": Mean(difference.abs().sum(), count),
        "mismatch/logprob_max": Max(difference.abs().max()),
        "mismatch/kl": Mean(kl.sum(), count),
    }


def _spread(logprobs: Tensor, step: TrainBatch, computed: list[int]) -> Tensor:
    """Log-probs of the computed samples at their places in the step; NaN for the trained tokens of the others. [T]"""
    out = torch.zeros(step.num_tokens).masked_fill(step.loss_mask, math.nan)
    out[stretches(step.lengths, torch.tensor(computed))] = logprobs
    return out


def steps_of(batch: TrainBatch, plan: BatchPlan, seed: int) -> Iterator[TrainBatch]:
    """The steps of `numbered_steps`."""
    return (step for _, step in numbered_steps(batch, plan, seed))


def numbered_steps(batch: TrainBatch, plan: BatchPlan, seed: int) -> Iterator[tuple[list[int], TrainBatch]]:
    """Cut a rollout's samples into its optimizer steps, every epoch in a new order. With each come the places of its samples in the batch.

    The samples of one trajectory stay in one step. Where a rollout feeds a single step, that step is the batch as it is.
    Trajectories that left no sample make steps smaller; there are fewer only if trajectories are fewer than steps.

    Args:
        batch: all samples of the rollout.
        plan: the batch arithmetic.
        seed: seed of the shuffles; give each rollout its own.
    """
    if plan.optimizer_steps == 1:
        yield list(range(batch.num_samples)), batch
        return
    by_trajectory: dict[int, list[int]] = {}
    for i, trajectory in enumerate(as_list(batch.trajectory)):
        by_trajectory.setdefault(trajectory, []).append(i)
    trajectories = list(by_trajectory)
    rng = random.Random(seed)
    for _ in range(plan.epochs):
        rng.shuffle(trajectories)
        for part in _even(trajectories, plan.steps_per_rollout):
            if part:
                samples = [i for t in part for i in by_trajectory[t]]
                yield samples, batch.select(samples)


def _even(items: list[int], parts: int) -> Iterator[list[int]]:
    """Cut a list into parts whose sizes differ by one at most."""
    size, spare = divmod(len(items), parts)
    start = 0
    for i in range(parts):
        stop = start + size + (i < spare)
        yield items[start:stop]
        start = stop
