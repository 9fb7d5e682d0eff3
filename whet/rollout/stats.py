"""Counts of events between two rollouts, and the checks that stop a run in which too much fails."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from whet.observe.metrics import Last, Mean, Metrics, Total
from whet.rollout.control import ControlConfig
from whet.rollout.group_run import GroupRun, group_restored, group_state
from whet.rollout.metrics import RolloutFailed, failure_lines, failures_text
from whet.rollout.token_account import dropped_metrics
from whet.types import JSON, Failure, Group, Task, Trajectory


@dataclass(slots=True)
class RolloutStats:
    """Counts of the groups and trajectories played since the last rollout was taken."""

    failed: list[Trajectory] = field(default_factory=list[Trajectory])
    recent: deque[tuple[str, Failure | None]] = field(default_factory=deque[tuple[str, "Failure | None"]])
    """The last trajectories that ended, of earlier rollouts too, by id, each with why it failed; not those of an earlier start."""
    num_recent_failures: int = 0
    """Those of `recent` that failed."""
    num_kept: int = 0
    num_retries: int = 0
    num_called_in: int = 0
    """Groups that were kept although a filter dropped them."""
    busy_s: float = 0.0
    """Busy time of the engine since the last rollout was taken."""
    busy_before_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter[str])
    """Number of dropped groups by reason."""
    in_a_row: Counter[str] = field(default_factory=Counter[str])
    """Number of dropped groups by reason, since one was kept."""
    groups: list[Group] = field(default_factory=list[Group])
    """Groups that were dropped."""

    def ended(self, trajectory: Trajectory) -> None:
        self.recent.append((trajectory.id, trajectory.error))
        self.num_recent_failures += trajectory.error is not None
        if not trajectory.outcome.valid:
            self.failed.append(trajectory)

    def spoilt(self, before: Group, after: Group) -> None:
        """A reward of siblings together failed: so did those that had ended well."""
        pairs = zip(before.trajectories, after.trajectories, strict=True)
        spoilt = {late.id: late for early, late in pairs if early.outcome.valid and not late.outcome.valid}
        if spoilt:
            self.failed += spoilt.values()
            self.recent = deque((id, spoilt[id].error if id in spoilt else error) for id, error in self.recent)
            self.num_recent_failures = sum(error is not None for _, error in self.recent)

    def judged(self, group: Group, reason: str | None, num_wanted: int, control: ControlConfig) -> None:
        """A group was kept, or dropped for a reason.

        Raises:
            RolloutFailed: too many were dropped one after another, or too many trajectories failed.
        """
        if reason is None:
            self.num_kept += 1
            self.in_a_row.clear()
        else:
            self.in_a_row[reason] += 1
            self.dropped(group, reason)
        self._check_errors(max(num_wanted * len(group.trajectories), control.error_window), control.max_error_rate)
        if self.in_a_row.total() >= control.give_up_after * num_wanted:
            counts = ", ".join(f"{count} for {reason}" for reason, count in self.in_a_row.most_common())
            failures = "\n" + failures_text(self.failed) if self.failed else ""
            raise RolloutFailed(
                f"the filters dropped {self.in_a_row.total()} groups one after another ({counts}): there is nothing to learn from. See "
                "what the tasks and the reward give (whet check plays some), loosen control.filters, or raise control.give_up_after"
                + failures
            )

    def _check_errors(self, window: int, max_error_rate: float) -> None:
        """Check the share of failures among the last `window` trajectories, once there are that many."""
        while len(self.recent) > window:
            _, failure = self.recent.popleft()
            self.num_recent_failures -= failure is not None
        if len(self.recent) == window and self.num_recent_failures > max_error_rate * window:
            failures = [failure for _, failure in self.recent if failure is not None]
            raise RolloutFailed(
                f"{len(failures)} of {window} trajectories failed, which is more than control.max_error_rate = {max_error_rate:g} of them\n"
                "mend what failed and start the same command again: it goes on; or raise control.max_error_rate to train on the rest\n"
                f"{failure_lines(failures)}\n{failures[0].traceback}".rstrip()
            )

    def busy(self, total_s: float) -> None:
        """Set the engine's busy time since the last rollout, from its total."""
        self.busy_s, self.busy_before_s = total_s - self.busy_before_s, total_s

    def may_retry(self, trajectory: Trajectory, budget: int | None) -> bool:
        """Use one retry of the budget. False: the budget is used up."""
        if budget is not None and self.num_retries >= budget:
            return False
        self.num_retries += 1
        self.groups.append(Group(trajectory.task, (trajectory,), dropped="retried"))
        return True

    def restarted(self, trajectory: Trajectory) -> None:
        """An interrupted trajectory is played from its beginning."""
        if trajectory.num_tokens_played:
            self.groups.append(Group(trajectory.task, (trajectory,), dropped="restarted"))

    @property
    def num_tokens(self) -> int:
        """Tokens of the groups that no rollout has reported yet."""
        return sum(t.num_tokens_played for group in self.groups for t in group.played)

    def dropped(self, group: Group, reason: str) -> None:
        self.reasons[reason] += 1
        self.groups.append(replace(group, dropped=reason))

    def cut(self, group_run: GroupRun, reason: str) -> None:
        """Count the tokens of an interrupted group as dropped."""
        there = tuple(t for t in group_run.there if t.turns or t.num_tokens_untrained)
        if there:
            self.dropped(Group(group_run.task, there), reason)

    def state(self) -> JSON:
        """Checkpointed state: the groups that no rollout has reported yet, and their counts."""
        groups = [group_state(group) for group in self.groups]
        return {"groups": groups, "kept": self.num_kept, "retries": self.num_retries, "reasons": dict(self.reasons)}

    @classmethod
    def restored(cls, state: JSON, find: Callable[[str], Task]) -> RolloutStats:
        """The counts that `state` describes."""
        groups = [group_restored(each, find) for each in state["groups"]]
        return cls(groups=groups, num_kept=state["kept"], num_retries=state["retries"], reasons=Counter(state["reasons"]))

    def take(self, *, num_ready: int, num_playing: int) -> tuple[list[Group], Metrics]:
        """The dropped groups and the metrics since the last call, for a rollout that is taken.

        Returns:
            metrics: `groups/kept`, `groups/dropped/<reason>` and, of those kept, `groups/called_in`;
                the tokens of dropped groups, retries, and the numbers of groups that are finished and
                in flight, apart from the taken ones.
        """
        groups, self.groups = self.groups, []
        tokens: Counter[str] = Counter()
        for group in groups:
            tokens[group.dropped or ""] += sum(t.num_tokens_played for t in group.played)
        metrics: Metrics = {
            "groups/kept": Mean(self.num_kept, self.num_kept + self.reasons.total()),
            "rollout/dropped_tokens": Total(tokens.total()),
            **dropped_metrics(tokens),
            "rollout/retries": Total(self.num_retries),
            "time/engine_busy_s": Total(self.busy_s),
            "rollout/ready_groups": Last(num_ready),
            "rollout/playing_groups": Last(num_playing),
            **({"groups/called_in": Total(self.num_called_in)} if self.num_called_in else {}),
            **{f"groups/dropped/{reason}": Total(count) for reason, count in sorted(self.reasons.items())},
        }
        self.failed, self.num_kept, self.num_retries, self.reasons = [], 0, 0, Counter()
        self.num_called_in = 0
        return groups, metrics
