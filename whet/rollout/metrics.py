"""Metrics of a rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum
from numbers import Real

from whet.config import Hook
from whet.data.special import SPELLED, SPELLED_METRIC
from whet.env.history import THINKING_LEFT_OUT
from whet.env.rollout import CUT_BY_ANSWER
from whet.observe.metrics import Mean, Metrics, Total, distribution
from whet.rollout.samples import score_of
from whet.types import Failure, Group, Outcome, RunFailed, Trajectory


class RolloutFailed(RunFailed):
    """Every trajectory of a rollout failed, or every greedy one that they are compared with: there is nothing to learn from."""


def require_valid(groups: Sequence[Group], what: str) -> None:
    """See that something succeeded.

    Args:
        groups: groups of a rollout or an evaluation.
        what: names it in the error.

    Raises:
        RolloutFailed: if nothing did, with how many failed of each kind and place, and the first of them.
    """
    _require([t for group in groups for t in group.trajectories], what, "trajectories")
    greedy = [group.baseline for group in groups if group.baseline is not None]
    if greedy:
        _require(greedy, what, "greedy trajectories, which the others are compared with,")


def _require(trajectories: Sequence[Trajectory], what: str, who: str) -> None:
    if any(t.outcome.valid for t in trajectories):
        return
    # A line of its own for each: the first holds nothing that a failure's message may quote.
    raise RolloutFailed(f"{what}: all {len(trajectories)} {who} failed\n{failures_text(trajectories)}")


def failures_text(trajectories: Sequence[Trajectory]) -> str:
    """Failures of the trajectories: a line for each kind and place, with their number and the first
    message."""
    return failure_lines([t.error for t in trajectories if t.error is not None])


def failure_lines(failures: Sequence[Failure]) -> str:
    """Failures: a line for each kind and place, with their number and the first message."""
    kinds: dict[tuple[str, str], list[Failure]] = {}
    for error in failures:
        kinds.setdefault((error.kind, error.where), []).append(error)
    return "\n".join(f"{len(errors)} in {where}: {kind}: {errors[0].message}" for (kind, where), errors in kinds.items())


def rollout_metrics(groups: Sequence[Group]) -> Metrics:
    """Rewards and their components, lengths, turns, outcomes, tool calls and waiting times of a rollout.

    Rewards are means over the valid trajectories; rates are over all of them. Greedy trajectories count under `baseline/` alone.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    num = len(trajectories)
    scored = [t.rewards for t in trajectories if t.rewards is not None and t.outcome.valid]
    out: Metrics = {"reward/total": Mean(sum(r.total for r in scored), len(scored))}
    if any(turn.token_rewards is not None for t in trajectories for turn in t.turns):
        out["reward/of_tokens"] = Mean(sum(t.token_reward for t in trajectories if t.outcome.valid), len(scored))
    for name in sorted({name for r in scored for name in r.components}):
        out[f"reward/{name}"] = Mean(sum(r.components.get(name, 0.0) for r in scored), len(scored))
    out.update(distribution("response/tokens", [t.num_tokens_sampled for t in trajectories]))
    out["response/turns"] = Mean(sum(len(t.turns) for t in trajectories), num)
    outcomes = Counter(t.outcome for t in trajectories)
    for outcome in Outcome:
        if outcome in outcomes or outcome in (Outcome.COMPLETED, Outcome.TRUNCATED):
            out[f"outcome/{outcome.value}"] = Mean(outcomes[outcome], num)
    out["outcome/failed"] = Mean(sum(not t.outcome.valid for t in trajectories), num)
    if cut := sum(trajectory.counts.get(CUT_BY_ANSWER, 0) for trajectory in trajectories):
        out[f"outcome/{CUT_BY_ANSWER}"] = Mean(cut, num)
    if left_out := sum(trajectory.counts.get(THINKING_LEFT_OUT, 0) for trajectory in trajectories):
        out["response/thinking_left_out"] = Total(left_out)
    if spelled := sum(trajectory.counts.get(SPELLED, 0) for trajectory in trajectories):
        out[SPELLED_METRIC] = Total(spelled)
    out.update(_tool_metrics(trajectories))
    out.update(_noted_metrics(trajectories))
    out.update(_baseline_metrics(groups))
    return out


def _baseline_metrics(groups: Sequence[Group]) -> Metrics:
    """The greedy trajectories: what they scored and cost, how many failed, and how many valid trajectories cannot be trained on
    therefore."""
    pairs = [(group, group.baseline) for group in groups if group.baseline is not None]
    if not pairs:
        return {}
    scores = [score for _, greedy in pairs if (score := score_of(greedy)) is not None]
    failed = [group for group, greedy in pairs if not greedy.outcome.valid]
    return {
        "baseline/reward": Mean(sum(scores), len(scores)),
        "baseline/failed": Mean(len(failed), len(pairs)),
        "baseline/excluded": Total(sum(t.outcome.valid for group in failed for t in group.trajectories)),
        **distribution("baseline/tokens", [greedy.num_tokens_sampled for _, greedy in pairs]),
    }


def _tool_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        counts.update(trajectory.counts)
    calls, malformed, errors = (counts[k] for k in ("tool_calls", "tool_calls_malformed", "tool_errors"))
    if calls + malformed == 0:
        return {}
    return {
        "tools/calls": Mean(calls, len(trajectories)),
        "tools/validity": Mean(calls - errors, calls + malformed),
    }


def _noted_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Numbers that tools and environments reported, each over those who did, and shares of trajectories by the reason of their end."""
    found: dict[str, list[float]] = {}
    for note in (note for trajectory in trajectories for turn in trajectory.turns for note in turn.notes):
        for name, value in note.metrics.items():
            found.setdefault(name, []).append(float(value))
    stops = Counter(t.stop for t in trajectories if t.stop is not None)
    return {
        **{f"env/{name}": Mean(fsum(values), len(values)) for name, values in sorted(found.items())},
        **{f"outcome/stopped/{reason}": Mean(count, len(trajectories)) for reason, count in sorted(stops.items())},
    }


def new_failures(groups: Sequence[Group], seen: set[tuple[str, str]]) -> list[tuple[str, Failure]]:
    """The first failure of each kind and place that `seen` does not hold yet, with its trajectory's id; `seen` grows."""
    out: list[tuple[str, Failure]] = []
    for group in groups:
        for trajectory in group.played:
            error = trajectory.error
            if error is not None and (error.kind, error.where) not in seen:
                seen.add((error.kind, error.where))
                out.append((trajectory.id, error))
    return out


def further_metrics(
    hook: Hook, rollout_id: int, groups: Sequence[Group], dropped: Sequence[Group], metrics: Mapping[str, float]
) -> dict[str, float]:
    """Metrics of a rollout from the function `observe.on_rollout`.

    Args:
        hook: a user's function; it may return nothing.
        rollout_id: number of the rollout, from 0 on.
        groups: groups that were trained on.
        dropped: groups that were played and not trained on, each with its reason.
        metrics: metrics of the rollout and its update, by name.

    Raises:
        HookFailed: it raised, or returned something else than numbers by names that are not taken.
    """
    returned = hook(rollout_id, list(groups), list(dropped), dict(metrics))
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise hook.refused(f"returned {type(returned).__name__}; return a dict of numbers by name, or None")
    for name, value in returned.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise hook.refused(f"returned {name!r}: {value!r}; return a dict of numbers by name, or None")
        if name in metrics:
            raise hook.refused(f"returned {name!r}, which is one of the run's own metrics; give yours another name")
    return {name: float(value) for name, value in returned.items()}
