"""Trajectories to training samples: what was sampled is what trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whet.train.batching import TrainOn
from whet.types import UNSAMPLED, Group, Origin, Outcome, Sample, Trajectory, Turn


def samples_of(trajectory: Trajectory, train_on: TrainOn = "model") -> list[Sample]:
    """One sample per unbroken chain of turns; a turn that rewrote the history starts the next.

    The loss mask covers exactly the tokens that the engine sampled; with `train_on="all"` also the
    tokens between them.
    """
    chains: list[list[Turn]] = []
    for turn in trajectory.turns:
        if turn.restart or not chains:
            chains.append([])
        chains[-1].append(turn)
    return [_sample_of(trajectory, chain, order, train_on) for order, chain in enumerate(chains)]


def samples_of_groups(groups: Sequence[Group], train_on: TrainOn = "model") -> list[Sample]:
    """All samples of a rollout, in order. Greedy trajectories give none, they are what the others are compared with."""
    return [sample for group in groups for sample in _samples_of_group(group, train_on)]


def _samples_of_group(group: Group, train_on: TrainOn) -> list[Sample]:
    """Samples of a group. If its greedy trajectory failed, there is no baseline, and no sample of the
    group is valid."""
    samples = [sample for trajectory in group.trajectories for sample in samples_of(trajectory, train_on)]
    if group.baseline is None:
        return samples
    score = score_of(group.baseline)
    return [replace(sample, baseline=score, valid=sample.valid and score is not None) for sample in samples]


def score_of(trajectory: Trajectory) -> float | None:
    """A trajectory's reward and all its token rewards, added up (`core.returns.scores`); None if it failed."""
    if not trajectory.outcome.valid or trajectory.rewards is None:
        return None
    return trajectory.rewards.total + trajectory.token_reward


def _sample_of(trajectory: Trajectory, chain: Sequence[Turn], order: int, train_on: TrainOn) -> Sample:
    tokens: list[int] = []
    origin: list[Origin] = []
    logprobs: list[float] = []
    versions: list[int] = []
    rewards: list[float] = []
    nucleus: list[bytes] = []
    for turn in chain:
        tokens.extend((*turn.context, *turn.tokens))
        origin.extend((*turn.context_origin, *(Origin.MODEL for _ in turn.tokens)))
        logprobs.extend((*(0.0 for _ in turn.context), *turn.logprobs))
        versions.extend((*(UNSAMPLED for _ in turn.context), *turn.versions))
        rewards.extend((*(0.0 for _ in turn.context), *(turn.token_rewards or (0.0 for _ in turn.tokens))))
        nucleus.extend((*(b"" for _ in turn.context), *(turn.nucleus or (b"" for _ in turn.tokens))))
    given = len(chain[0].context)  # the prompt, or a rewritten history
    return Sample(
        tokens=tuple(tokens),
        origin=tuple(origin),
        loss_mask=tuple(t >= given if train_on == "all" else o is Origin.MODEL for t, o in enumerate(origin)),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        group=trajectory.task.id,
        trajectory=trajectory.id,
        order=order,
        reward=trajectory.rewards.total if trajectory.rewards is not None else 0.0,
        valid=trajectory.outcome.valid and trajectory.rewards is not None,
        temperature=trajectory.temperature,
        token_rewards=tuple(rewards) if any(turn.token_rewards for turn in chain) else None,
        nucleus=tuple(nucleus) if any(turn.nucleus for turn in chain) else None,
        truncated=trajectory.outcome is Outcome.TRUNCATED,
    )
