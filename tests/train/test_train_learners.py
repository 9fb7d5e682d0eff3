from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from tests.train.tiny_policy import rollout, rollout_samples, trajectory
from whet.algo.base import LossTerms, Need, StepPlan
from whet.algo.config import GRPOConfig, PPOConfig
from whet.algo.grpo import grpo
from whet.algo.table import build_algorithm
from whet.core.batch import batch_of
from whet.core.nonfinite import NonFinite
from whet.observe.metrics import Mean, flatten
from whet.train.base import Backward
from whet.train.batching import BatchPlan
from whet.train.critic import fit_of
from whet.train.learners import Critic, Learners, Models, Refresh, mismatch
from whet.types import Progress


@dataclass
class FakeBackend:
    """Answers log-probs of `level`, and remembers what it was asked to do, in order."""

    level: float = -1.0
    calls: list = field(default_factory=list)
    flops: int = 0

    def annotate(self, batch, need):
        self.calls.append(("annotate", need))
        return batch.with_(**{need.value: torch.where(batch.loss_mask, self.level, 0.0)})

    def named_weights(self):
        return [("level", self.level)]

    def copy_weights(self, source):
        self.calls.append(("copy_weights", source.named_weights()))

    def forward_backward(self, batch, loss, *, entropy_grad=False, per_token=False):
        self.calls.append(("forward_backward", batch, entropy_grad))
        logprobs = torch.where(batch.loss_mask, self.level - 0.1 * (len(self.calls) > 2), 0.0)
        return Backward(2.0, logprobs, {"fake/steps": Mean(1, 1)}, batch.num_tokens)

    def optim_step(self):
        self.calls.append(("optim_step",))
        return {"optim/grad_norm": Mean(3.0, 1)}


def plan(steps, epochs=1):
    return BatchPlan(prompts_per_rollout=3, samples_per_prompt=3, samples_per_step=9, steps_per_rollout=steps, epochs=epochs)


def learners(steps=1, epochs=1, reference=None, **settings):
    algorithm = grpo(GRPOConfig(**settings), StepPlan(steps * epochs))
    return Learners(Models(FakeBackend(), reference), algorithm, plan(steps, epochs), seed=4)


def update(found, progress=None):
    batch, _ = found.algorithm.assign_credit(found.annotate(rollout()))
    progress = progress or Progress()
    return found.update(batch, progress), batch, progress


def steps_seen(found):
    return [call[1] for call in found.policy.calls if call[0] == "forward_backward"]


def test_each_need_is_asked_of_whom_it_concerns():
    reference = FakeBackend(level=-7.0)
    found = learners(2, reference=reference, kl_coef=0.1)
    batch = found.annotate(rollout())
    assert found.policy.calls == [("annotate", Need.OLD_LOGPROBS)]
    assert reference.calls == [("annotate", Need.REF_LOGPROBS)]
    assert batch.old_logprobs.min() == -1.0 and batch.ref_logprobs.min() == -7.0


@pytest.mark.parametrize("reducer", ["sample_mean", "token_mean"])
def test_the_weights_of_each_step_sum_to_one(reducer):
    found = learners(2, 3, reducer=reducer, entropy_coef=0.1)
    _, _, progress = update(found)
    assert progress.optimizer_step == 6
    for step in steps_seen(found):
        usable = step.trajectory[step.valid].unique()
        trained = step.trajectory[step.sample_of_token[step.loss_mask]].unique()
        share = len(trained) / len(usable) if reducer == "sample_mean" else 1.0
        assert float(step.weights.sum()) == pytest.approx(share)
    order = [call[0] for call in found.policy.calls]
    assert order == ["annotate", *["forward_backward", "optim_step"] * 6]
    assert all(call[2] for call in found.policy.calls if call[0] == "forward_backward")


def test_each_rollout_is_cut_in_its_own_way_and_always_the_same():
    cuts = []
    for rollout_id in (0, 0, 1):
        found = learners(2)
        update(found, Progress(rollout_id=rollout_id))
        cuts.append([step.trajectory.tolist() for step in steps_seen(found)])
    assert cuts[0] == cuts[1] != cuts[2]


def test_a_step_without_a_trained_token_is_skipped():
    samples = [*trajectory("a", 0, [".##"], reward=1.0), *trajectory("b", 0, [".##"], reward=0.0)]
    found = learners()
    batch, _ = found.algorithm.assign_credit(batch_of(samples))
    progress = Progress()
    done = found.update(batch, progress)
    assert found.policy.calls == [] and progress.optimizer_step == 0
    assert done.metrics == {} and done.train_logprobs is None and done.num_tokens == 0


def test_only_the_empty_steps_are_skipped():
    samples = [s for s in rollout_samples() if s.group != "b"]
    samples += [*trajectory("z", 0, [".##"], reward=1.0)]
    found = learners(7)
    batch, _ = found.algorithm.assign_credit(found.annotate(batch_of(samples)))
    progress = Progress()
    found.update(batch, progress)
    assert progress.optimizer_step == len(steps_seen(found)) == 5  # the failed and the lonely trajectory have theirs


def test_metrics_are_means_over_the_steps():
    done, _, _ = update(learners(2))
    values = flatten(done.metrics)
    assert values["policy/loss"] == 2.0 and values["optim/grad_norm"] == 3.0 and values["fake/steps"] == 1.0


def difference(batch, level):
    return (level - batch.rollout_logprobs.double())[batch.loss_mask]


def test_one_step_measures_the_mismatch_on_its_own_pass():
    done, batch, _ = update(learners())
    away = difference(batch, -1.0)
    values = flatten(done.metrics)
    assert values["mismatch/logprob_mean"] == pytest.approx(float(away.abs().mean()))
    assert values["mismatch/logprob_max"] == pytest.approx(float(away.abs().max()))
    assert values["mismatch/kl"] == pytest.approx(float((away.exp() - 1 - away).mean()))
    assert torch.equal(done.train_logprobs, torch.where(batch.loss_mask, -1.0, 0.0))


def test_several_steps_measure_it_on_the_old_logprobs():
    done, batch, _ = update(learners(2))
    assert flatten(done.metrics)["mismatch/logprob_mean"] == pytest.approx(float(difference(batch, -1.0).abs().mean()))
    assert torch.equal(done.train_logprobs, batch.old_logprobs)


def test_several_steps_on_the_engines_logprobs_measure_it_before_the_first():
    found = learners(2, old_logprobs="rollout")
    done, _, _ = update(found)
    first = steps_seen(found)[0]
    assert flatten(done.metrics)["mismatch/logprob_mean"] == pytest.approx(float(difference(first, -1.0).abs().mean()))
    assert done.train_logprobs is None


def test_without_trained_tokens_there_is_no_mismatch():
    batch = rollout()
    assert mismatch(batch.with_(loss_mask=torch.zeros_like(batch.loss_mask)), torch.zeros(batch.num_tokens)) == {}


def test_an_algorithm_prepares_each_step_after_its_weights():
    def prepare(batch):
        assert batch.weights is not None
        return batch.with_(returns=torch.full_like(batch.weights, 5.0))

    algorithm = grpo(GRPOConfig(), StepPlan(1))
    algorithm.prepare = prepare
    algorithm.loss = lambda batch, out: LossTerms(batch.returns, {})
    found = Learners(Models(FakeBackend()), algorithm, plan(1), seed=0)
    update(found)
    assert steps_seen(found)[0].returns.unique().tolist() == [5.0]


def ppo_learners(steps=2, epochs=1, warmup=0):
    algorithm = build_algorithm(PPOConfig(), StepPlan(steps * epochs))
    critic = Critic(FakeBackend(level=0.3), algorithm.value_loss, warmup)
    return Learners(Models(FakeBackend(), critic=critic), algorithm, plan(steps, epochs), seed=4)


def test_values_are_asked_of_the_critic_and_its_steps_are_the_policys():
    found = ppo_learners(2, 3)
    done, batch, progress = update(found)
    critic = found.critic.backend
    assert critic.calls[0] == ("annotate", Need.VALUES) and ("annotate", Need.VALUES) not in found.policy.calls
    mine, theirs = steps_seen(found), [call[1] for call in critic.calls if call[0] == "forward_backward"]
    assert len(mine) == len(theirs) == 6 and progress.optimizer_step == 6
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.weights, b.weights) and torch.equal(a.returns, b.returns)
    assert done.num_tokens == sum(step.num_tokens for step in (*mine, *theirs))
    values = flatten(done.metrics)
    assert (values["critic/grad_norm"], values["critic/loss"], values["policy/loss"], values["optim/grad_norm"]) == (3.0, 2.0, 2.0, 3.0)
    returns = batch.returns[batch.loss_mask].double()
    level = 1 - (returns - 0.3).var(correction=0) / returns.var(correction=0)
    assert values["critic/explained_variance"] == pytest.approx(float(level), abs=1e-6)


def test_explained_variance_is_one_for_right_values_and_falls_with_their_error():
    batch = rollout()
    returns = torch.linspace(-1, 1, batch.num_tokens)

    def found(values):
        return flatten(fit_of(batch.with_(values=values, returns=returns)))["critic/explained_variance"]

    noise = torch.sin(torch.arange(batch.num_tokens) * 2.3)
    error = noise[batch.loss_mask].double().numpy()
    assert found(returns) == pytest.approx(1.0) and found(returns + 7) == pytest.approx(1.0)
    assert found(returns + noise) == pytest.approx(1 - error.var() / returns[batch.loss_mask].double().numpy().var(), rel=1e-6)
    assert fit_of(batch.with_(values=noise, returns=torch.ones(batch.num_tokens))) == {}


def test_a_critic_that_warms_up_learns_alone():
    found = ppo_learners(warmup=2)
    for rollout_id, policy_learns in ((0, False), (1, False), (2, True)):
        found.policy.calls.clear()
        done, _, progress = update(found, Progress(rollout_id=rollout_id))
        assert (progress.optimizer_step > 0) == bool(steps_seen(found)) == ("policy/loss" in done.metrics) == policy_learns
        assert "critic/loss" in done.metrics and done.num_tokens > 0


def test_a_failed_step_says_whose_it_was():
    found = ppo_learners()

    def fail():
        raise NonFinite("the gradient norm is nan")

    found.critic.backend.optim_step = fail
    with pytest.raises(NonFinite) as caught:
        update(found)
    assert caught.value.learner == "critic" and caught.value.batch.weights is not None
    assert steps_seen(found) == [], "the policy learns after the critic"
    other = ppo_learners()
    other.policy.optim_step = fail
    with pytest.raises(NonFinite) as caught:
        update(other)
    assert caught.value.learner == "policy"


def test_a_reference_is_refreshed_after_every_so_many_rollouts():
    reference = FakeBackend()
    algorithm = grpo(GRPOConfig(kl_coef=0.1), StepPlan(2))
    found = Learners(Models(FakeBackend(level=-2.5), reference, Refresh(reference, 3)), algorithm, plan(2), seed=4)
    taken = []
    for rollout_id in range(7):
        update(found, Progress(rollout_id=rollout_id))
        taken.append(("copy_weights", [("level", -2.5)]) in reference.calls)
        reference.calls.clear()
    assert taken == [False, False, True, False, False, True, False]
    assert list(found.models.auxiliary) == ["reference"]
    assert learners(2, reference=reference, kl_coef=0.1).models.auxiliary == {}, "one that stays is not saved"


def test_a_teacher_is_asked_for_its_logprobs():
    teacher = FakeBackend(level=-9.0)
    algorithm = grpo(GRPOConfig(distill_coef=0.5), StepPlan(1))
    found = Learners(Models(FakeBackend(), teacher=teacher), algorithm, plan(1), seed=4)
    batch = found.annotate(rollout())
    assert teacher.calls == [("annotate", Need.TEACHER_LOGPROBS)] and batch.teacher_logprobs.min() == -9.0
    assert found.models.auxiliary == {}
