"""Evaluation sets: held-out tasks, each set with its own sampling, limits, environment and reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from whet.evaluate.passk import pass_at_k
from whet.observe.metrics import Mean, Metrics, Total
from whet.observe.records import RecordWriter, RolloutNumbers
from whet.rollout.metrics import require_valid, rollout_metrics
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.samples import samples_of_groups, score_of
from whet.types import Group, Proof, Task

EVALUATIONS = "evaluations"
"""The folder of evaluation records below a run's folder."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A set, ready to play."""

    name: str
    tasks: Sequence[Task]
    runner: TrajectoryRunner
    samples_per_prompt: int
    pass_reward: float
    records: RecordWriter | None

    async def play(self, seed: int) -> list[Group]:
        """Play every task."""
        return await self.runner.play(self.tasks, self.samples_per_prompt, seed)

    def summarise(self, rollout_id: int, groups: Sequence[Group], proofs: Mapping[int, Proof] = MappingProxyType({})) -> Metrics:
        """Record what was played after `rollout_id` rollouts, with the proofs of its versions, and sum it up.

        Returns:
            Metrics named `eval/<set>/...`: mean@n (a mean over tasks), pass@k for n and the powers of two below, lengths, outcomes.
            Rewards of tokens count in both. Failed trajectories are counted and left out of the means.

        Raises:
            RolloutFailed: if every trajectory failed.
        """
        require_valid(groups, f"evaluation {self.name}")
        if self.records is not None:
            self.records.write(rollout_id, groups, samples_of_groups(groups), RolloutNumbers(proofs=proofs))
        return {f"eval/{self.name}/{key}": value for key, value in self._summary(groups).items()}

    def _summary(self, groups: Sequence[Group]) -> Metrics:
        out: Metrics = rollout_metrics(groups)
        num = self.samples_per_prompt
        means = [sum(totals) / len(totals) for group in groups if (totals := _totals(group))]
        out[f"mean@{num}"] = Mean(sum(means), len(means))
        for k in sorted({2**i for i in range(num.bit_length()) if 2**i <= num} | {num}):
            chances = [c for group in groups if (c := self._chance(group, k)) is not None]
            out[f"pass@{k}"] = Mean(sum(chances), len(chances))
        out["tasks"] = Total(len(groups))
        return out

    def _chance(self, group: Group, k: int) -> float | None:
        """pass@k of one task over its valid trajectories; None if there are fewer than k."""
        totals = _totals(group)
        if len(totals) < k:
            return None
        return pass_at_k(len(totals), sum(r >= self.pass_reward for r in totals), k)


def _totals(group: Group) -> list[float]:
    """Scores of a task's valid trajectories."""
    return [score for t in group.trajectories if (score := score_of(t)) is not None]


def set_folder(run_dir: Path, name: str) -> Path:
    """Folder of an evaluation set's records."""
    return run_dir / EVALUATIONS / name


def set_folders(run_dir: Path) -> list[Path]:
    """The folders of the evaluation sets that left records."""
    return sorted(path for path in (run_dir / EVALUATIONS).glob("*") if path.is_dir())
