"""Batch arithmetic: how many prompts, samples and optimizer steps a rollout has, and what is due after it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config import Config, Reference

TrainOn = Literal["model", "all"]


class BatchConfig(Config):
    """prompts_per_rollout x samples_per_prompt = samples_per_step x steps_per_rollout. Any one may be left out."""

    prompts_per_rollout: int | None = Field(default=None, gt=0)
    """Prompts that a rollout takes."""
    samples_per_prompt: int | None = Field(default=None, gt=0)
    """Trajectories sampled from each prompt."""
    samples_per_step: int | None = Field(default=None, gt=0)
    """Trajectories that one optimizer step learns from (the global batch size)."""
    steps_per_rollout: int | None = Field(default=None, gt=0)
    """Optimizer steps that a rollout feeds, per epoch."""
    epochs: int = Field(default=1, gt=0)
    """Passes over a rollout's samples; each one divides them into steps again, in a new order."""
    train_on: TrainOn = "model"
    """Tokens of a rollout that train. model: the tokens that the policy sampled; all: also the
    environment's answers between them, with the same advantages, as if the policy had sampled them (the
    trainer's log-prob replaces the engine's)."""
    skip_zero_advantage: bool = True
    """Leave out of an update's forward and backward passes the samples without a gradient: those whose advantages are all 0 (a group
    of equal rewards), unless the loss has an entropy bonus, a KL to the reference or a term of your own. The gradient is the same; what
    an update measures of its tokens (entropy, clip fraction, mismatch, `train_logprobs`) is of the others only. false: compute all."""
    process: Reference | None = None
    """Import reference to a function `(samples, groups) -> samples` that changes a rollout's samples before they are a batch: masks,
    rewards, which of them count (docs/extending.md)."""


class BatchPlan(Config):
    """The equation, solved."""

    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_step: int
    steps_per_rollout: int
    epochs: int
    skip_zero_advantage: bool = True

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout, all epochs."""
        return self.steps_per_rollout * self.epochs


def plan_batch(config: BatchConfig) -> BatchPlan:
    """Solve the batch equation.

    Two missing values are filled by their usual ones first: one step per rollout, one sample per prompt.

    Raises:
        ValueError: if it has no solution in whole numbers; the text shows it with the numbers.
    """
    names = ("prompts_per_rollout", "samples_per_prompt", "samples_per_step", "steps_per_rollout")
    known = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    for name in ("steps_per_rollout", "samples_per_prompt"):
        if len(known) < 3 and name not in known:
            known[name] = 1
    if len(known) < 3:
        missing = [name for name in names if name not in known]
        raise ValueError(f"batch: cannot derive {' and '.join(missing)}; set one of them. {_equation(known)}")
    left, right = names[:2], names[2:]
    for name in names:
        if name in known:
            continue
        mine, other = (left, right) if name in left else (right, left)
        product = known[other[0]] * known[other[1]]
        partner = known[next(n for n in mine if n != name)]
        if product % partner:
            raise ValueError(f"batch: {name} would be {product}/{partner}, no whole number. {_equation(known)}")
        known[name] = product // partner
    if known[left[0]] * known[left[1]] != known[right[0]] * known[right[1]]:
        raise ValueError(f"batch: the sizes contradict each other. {_equation(known)}")
    return BatchPlan(**known, epochs=config.epochs, skip_zero_advantage=config.skip_zero_advantage)


def _equation(known: dict[str, int]) -> str:
    def term(name: str) -> str:
        return f"{name} ({known.get(name, '?')})"

    text = (
        f"{term('prompts_per_rollout')} x {term('samples_per_prompt')} = "
        f"{term('samples_per_step')} x {term('steps_per_rollout')}"
    )
    if len(known) == 4:
        text += (
            f", but {known['prompts_per_rollout'] * known['samples_per_prompt']} is not "
            f"{known['samples_per_step'] * known['steps_per_rollout']}"
        )
    return text


def due(done: int, total: int, interval: int | None) -> bool:
    """True if a recurring task is due after `done` of `total` rollouts: after every `interval` of them
    (None: not in between), and after the last."""
    return done > 0 and (done == total or (interval is not None and done % interval == 0))
