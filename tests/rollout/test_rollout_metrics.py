"""What is said where nothing succeeded."""

from __future__ import annotations

import pytest

from whet.rollout.metrics import RolloutFailed, new_failures, require_valid
from whet.types import Failure, Group, Outcome, Task, Trajectory

TASK = Task("t", "2+3?")
BROKE = Failure("KeyError", "'a'", "env.step", "Traceback of a\n")
BROKE_TOO = Failure("KeyError", "'b'", "env.step", "Traceback of b\n")
LATE = Failure("RewardTimeout", "took longer than 5 s", "reward")


def group(*errors: Failure | None) -> Group:
    outcomes = [Outcome.COMPLETED if error is None else Outcome.ENV_ERROR for error in errors]
    pairs = enumerate(zip(outcomes, errors, strict=True))
    return Group(TASK, tuple(Trajectory(f"t/{k}", TASK, (), outcome, error=error) for k, (outcome, error) in pairs))


def test_where_nothing_succeeded_the_first_of_each_kind_is_told():
    groups = [group(BROKE, LATE), group(BROKE_TOO)]
    with pytest.raises(RolloutFailed) as failed:
        require_valid(groups, "rollout 3")
    assert str(failed.value) == (
        "rollout 3: all 3 trajectories failed\n2 in env.step: KeyError: 'a'\n1 in reward: RewardTimeout: took longer than 5 s"
    )


def test_where_something_succeeded_a_kind_is_told_once():
    groups = [group(BROKE, LATE, None), group(BROKE_TOO)]
    require_valid(groups, "rollout 3")
    seen: set[tuple[str, str]] = set()
    assert new_failures(groups, seen) == [("t/0", BROKE), ("t/1", LATE)]
    assert new_failures(groups, seen) == []


def test_aborted_trajectories_have_no_error_to_tell():
    aborted = Group(TASK, (Trajectory("t/0", TASK, (), Outcome.ABORTED),))
    with pytest.raises(RolloutFailed, match=r"^rollout 3: all 1 trajectories failed$"):
        require_valid([aborted], "rollout 3")
