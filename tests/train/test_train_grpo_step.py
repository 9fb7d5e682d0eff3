"""A whole GRPO update against one written here from the paper with transformers and torch alone."""

from __future__ import annotations

import statistics

import pytest
import torch

from tests.train.tiny_policy import gradients, plain, policy, relative, rollout_samples
from whet.algo.base import StepPlan
from whet.algo.config import GRPOConfig
from whet.algo.grpo import grpo
from whet.core.batch import batch_of
from whet.observe.metrics import flatten
from whet.train.batching import BatchPlan
from whet.train.learners import Learners, Models, steps_of
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Progress

SEED, ROLLOUT_ID = 5, 3


def plain_update(model, reference, data, steps, recipe):
    """Every optimizer step of a rollout, one sequence at a time. Nothing here comes from whet but `data`.

    `data` holds the samples, `steps` the trajectory ids of each optimizer step. Returns loss, gradient norm and gradients of
    each step.
    """

    def forward(net, s):
        logits = net(input_ids=torch.tensor([s.tokens])).logits[0, :-1] / s.temperature
        logp = logits.log_softmax(-1)
        mask = torch.tensor(s.loss_mask[1:], dtype=torch.bool)
        taken = logp.gather(-1, torch.tensor(s.tokens)[1:, None]).squeeze(-1)
        return taken[mask], -(logp.exp() * logp).sum(-1)[mask]

    rewards = {s.trajectory: (s.group, s.reward) for s in data if s.valid}
    siblings = {g: [r for other, r in rewards.values() if other == g] for g, _ in rewards.values()}
    advantage = {}
    for trajectory, (group, reward) in rewards.items():
        if len(siblings[group]) >= 2:
            std = statistics.stdev(siblings[group]) + 1e-6 if recipe["normalize_std"] else 1.0
            advantage[trajectory] = (reward - statistics.mean(siblings[group])) / std
    with torch.no_grad():
        old, ref = ([forward(net, s)[0] for s in data] for net in (model, reference))
    adamw = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], betas=(0.9, 0.95), eps=recipe["eps"], weight_decay=0.0)
    out = []
    for step in steps:
        used = [i for i, s in enumerate(data) if s.trajectory in step and s.trajectory in advantage]
        tokens = {t: sum(sum(data[i].loss_mask) for i in used if data[i].trajectory == t) for t in step}
        present = {data[i].trajectory for i in used}
        loss = torch.zeros(())
        for i in used:
            s, (logp, entropy) = data[i], forward(model, data[i])
            a, ratio, away = advantage[s.trajectory], (logp - old[i]).exp(), ref[i] - logp
            terms = torch.max(-ratio * a, -ratio.clamp(1 - recipe["clip_low"], 1 + recipe["clip_high"]) * a)
            terms = terms - recipe["entropy_coef"] * entropy + recipe["kl_coef"] * (away.exp() - 1 - away)
            share = sum(tokens[t] for t in present) if recipe["reducer"] == "token_mean" else tokens[s.trajectory] * len(present)
            loss = loss + terms.sum() / max(share, 1)
        adamw.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip_grad"])
        adamw.step()
        out.append((float(loss.detach()), float(norm), grads))
    return out


class Recorded(TorchBackend):
    """Keeps the loss, and the gradients that the optimizer is given."""

    def __init__(self, *args):
        super().__init__(*args)
        self.losses, self.grads, self.norms, self.clipped = [], [], [], []

    def forward_backward(self, batch, loss, *, entropy_grad=False, per_token=False):
        found = super().forward_backward(batch, loss, entropy_grad=entropy_grad, per_token=per_token)
        self.losses.append(found.loss)
        self.clipped.append(flatten(found.metrics)["policy/clip_fraction"])
        self.grads.append(gradients(self.model))
        return found

    def optim_step(self):
        metrics = super().optim_step()
        self.norms.append(flatten(metrics)["optim/grad_norm"])
        return metrics


RECIPE = {
    "lr": 2e-2,
    "eps": 1e-4,
    "clip_grad": 0.7,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "entropy_coef": 0.02,
    "kl_coef": 0.05,
    "normalize_std": True,
    "reducer": "sample_mean",
}

BOUNDS = {"float32": (1e-5, 1e-4, 2e-3), "float64": (1e-6, 1e-5, 2.5e-4)}
"""How far the first step's gradients may be off by their norm, the later steps', and the weights in learning rates.

The batch's columns are float32 in either. Where a gradient is next to 0, Adam's first step turns an error of it into lr / eps
times as much of the weight: in float32 that is the rounding of the passes, which differs with the machine and its number of
threads, so the tight bounds are float64's."""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("steps_per_rollout", "epochs", "changes"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (2, 2, {"reducer": "token_mean"}),
        (1, 2, {"normalize_std": False, "entropy_coef": 0.0}),
        (2, 1, {"kl_coef": 0.0, "clip_grad": 1e9, "clip_high": 0.2}),
    ],
)
def test_an_update_is_the_one_written_by_hand(dtype, steps_per_rollout, epochs, changes):
    recipe = {**RECIPE, **changes}
    samples = rollout_samples()
    batch = batch_of(samples)
    plan = BatchPlan(
        prompts_per_rollout=3, samples_per_prompt=3, samples_per_step=9, steps_per_rollout=steps_per_rollout, epochs=epochs
    )
    names = list(dict.fromkeys(s.trajectory for s in samples))
    shuffle_seed = SEED * 1_000_003 + ROLLOUT_ID
    steps = [{names[i] for i in part.trajectory.tolist()} for part in steps_of(batch, plan, shuffle_seed)]

    model, frozen = policy(dtype), policy(dtype, seed=1)
    twin = plain(model)
    expected = plain_update(twin, plain(frozen), samples, steps, recipe)

    config = TrainConfig.model_validate(
        {
            "optim": {"lr": recipe["lr"], "betas": (0.9, 0.95), "eps": recipe["eps"], "clip_grad": recipe["clip_grad"]},
            "max_tokens_per_device": 33,
            "logprob_chunk_tokens": 5,
        }
    )
    chosen = {k: recipe[k] for k in ("clip_low", "clip_high", "entropy_coef", "kl_coef", "normalize_std", "reducer")}
    algorithm = grpo(GRPOConfig(**chosen, reference=True), StepPlan(plan.optimizer_steps))
    trained = Recorded(model, config, len(steps))
    learners = Learners(Models(trained, TorchBackend(frozen, config, None)), algorithm, plan, SEED)
    batch, _ = algorithm.assign_credit(learners.annotate(batch))
    progress = Progress(rollout_id=ROLLOUT_ID)
    learners.update(batch, progress)

    assert progress.optimizer_step == len(steps) == len(expected) == plan.optimizer_steps
    if len(steps) > 1:
        assert 0 < max(trained.clipped) < 1, "without a clipped token the later steps prove little"
    first, later, in_learning_rates = BOUNDS[dtype]
    for step, (loss, norm, grads) in enumerate(expected):
        tolerance = first if step == 0 else later
        assert trained.losses[step] == pytest.approx(loss, rel=tolerance, abs=1e-6)
        assert trained.norms[step] == pytest.approx(norm, rel=tolerance)
        assert trained.grads[step].keys() == grads.keys()
        for name, grad in grads.items():
            assert relative(trained.grads[step][name], grad) < tolerance, (step, name)
    moved = 0.0
    start = dict(policy(dtype).named_weights())
    for name, weight in twin.named_parameters():
        found = dict(trained.named_weights())[name].cpu()
        torch.testing.assert_close(found, weight, rtol=0, atol=recipe["lr"] * in_learning_rates)
        moved = max(moved, float((weight - start[name].cpu()).detach().abs().max()))
    assert moved > recipe["lr"] / 2
