"""Trajectories to training samples: what was sampled is what trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain as joined
from math import fsum

from whet.train.batching import TrainOn
from whet.types import UNSAMPLED, Group, Origin, Outcome, Sample, Trajectory, Turn
from whet.types.columns import Doubles, Floats, Ints, Ragged, Runs
from whet.types.routes import Routes


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
    score = {role: score_of(group.baseline, role) for role in {sample.role for sample in samples}}
    return [replace(s, baseline=score[s.role], valid=s.valid and score[s.role] is not None) for s in samples]


def score_of(trajectory: Trajectory, role: str | None = None) -> float | None:
    """A trajectory's reward and all its token rewards, added up (`core.returns.scores`); None if it failed. With a role: those of that
    role's turns."""
    if not trajectory.outcome.valid or trajectory.rewards is None:
        return None
    own = fsum(joined.from_iterable(turn.token_rewards or () for turn in trajectory.turns if role in (None, turn.role)))
    return (trajectory.rewards.total if role is None else trajectory.rewards.of(role)) + own


def _sample_of(trajectory: Trajectory, chain: Sequence[Turn], order: int, train_on: TrainOn) -> Sample:
    given = len(chain[0].context)  # the prompt, or a rewritten history
    origin = Runs.join(runs for turn in chain for runs in (turn.context_origin, Runs.repeat(Origin.MODEL, len(turn.tokens))))
    everything = [(False, given), (True, len(origin) - given)]
    return Sample(
        tokens=Ints.join(tokens for turn in chain for tokens in (turn.context, turn.tokens)),
        origin=origin,
        loss_mask=Runs.from_runs(everything if train_on == "all" else ((writer is Origin.MODEL, n) for writer, n in origin.runs())),
        logprobs=Floats.join(logprobs for turn in chain for logprobs in (Floats.zeros(len(turn.context)), turn.logprobs)),
        versions=Runs.join(runs for turn in chain for runs in (Runs.repeat(UNSAMPLED, len(turn.context)), turn.versions)),
        group=trajectory.task.id,
        trajectory=trajectory.id,
        order=order,
        reward=trajectory.rewards.of(chain[0].role) if trajectory.rewards is not None else 0.0,
        valid=trajectory.outcome.valid and trajectory.rewards is not None,
        temperature=trajectory.temperature,
        token_rewards=_token_rewards(chain),
        nucleus=_nucleus(chain),
        routes=_routes(chain),
        truncated=trajectory.outcome is Outcome.TRUNCATED,
        role=chain[0].role,
    )


def _token_rewards(chain: Sequence[Turn]) -> Doubles | None:
    if not any(turn.token_rewards for turn in chain):
        return None
    given = ((Doubles.zeros(len(turn.context)), turn.token_rewards or Doubles.zeros(len(turn.tokens))) for turn in chain)
    return Doubles.join(part for parts in given for part in parts)


def _nucleus(chain: Sequence[Turn]) -> Ragged | None:
    if not any(turn.nucleus for turn in chain):
        return None
    given = ((Ragged.empty(len(turn.context)), turn.nucleus or Ragged.empty(len(turn.tokens))) for turn in chain)
    return Ragged.join(part for parts in given for part in parts)


def _routes(chain: Sequence[Turn]) -> Routes | None:
    if all(turn.routes is None for turn in chain):
        return None
    return Routes.join(turn.routes or Routes.unknown(len(turn.context) + len(turn.tokens)) for turn in chain)
