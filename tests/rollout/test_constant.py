import re

import pytest

from whet.rollout.constant import WARN_AFTER, ConstantReward, RewardGuard
from whet.types import Group, Outcome, Rewards, Task, Trajectory

CUT = Outcome.TRUNCATED


def rollout(*rewards: float | None, greedy: float | None = None, ends: Outcome = Outcome.COMPLETED) -> list[Group]:
    """One group; None is a trajectory that failed, with a reward that does not count. `greedy`: what its greedy trajectory scored; `ends`:
    how those ended that did not fail."""
    task = Task("t", "?")

    def trajectory(i: int, reward: float | None) -> Trajectory:
        failed = reward is None
        return Trajectory(f"t/{i}", task, (), Outcome.TIMEOUT if failed else ends, Rewards(9.0 if failed else reward))

    baseline = None if greedy is None else trajectory(len(rewards), greedy)
    return [Group(task, tuple(trajectory(i, reward) for i, reward in enumerate(rewards)), baseline)]


def test_a_constant_is_warned_of_once_and_then_stopped():
    guard = RewardGuard(limit=5)
    warnings = []
    for _ in range(4):
        warnings.append(guard.see(rollout(0.5, 0.5, None)))
        guard.check()
    assert [i for i, warning in enumerate(warnings, start=1) if warning] == [WARN_AFTER]
    guard.see(rollout(0.5))
    with pytest.raises(ConstantReward, match=r"all 5 rollouts so far was given the reward 0\.5: .*stop_after_constant_rewards"):
        guard.check()


def test_a_greedy_trajectory_that_scores_otherwise_is_something_to_learn_from():
    for greedy, varied in ((0.5, False), (0.0, True)):
        guard = RewardGuard(limit=1)
        guard.see(rollout(0.5, 0.5, greedy=greedy))
        assert guard.state()["varied"] is varied


@pytest.mark.parametrize("other", [(0.0, 1.0), (1.0, 1.0)])
def test_what_has_varied_once_is_left_alone(other):
    """Within a rollout, or from one to the next: a task that is solved later is not a mistake."""
    guard = RewardGuard(limit=2)
    guard.see(rollout(0.0, 0.0))
    guard.see(rollout(*other))
    for _ in range(9):
        assert guard.see(rollout(1.0, 1.0)) is None
        guard.check()


def test_rollouts_without_a_reward_are_no_evidence():
    guard = RewardGuard(limit=2)
    for _ in range(9):
        assert guard.see(rollout(None, None)) is None
        guard.check()


def test_without_a_limit_it_only_warns():
    guard = RewardGuard(limit=None)
    assert sum(guard.see(rollout(1.0)) is not None for _ in range(100)) == 1
    guard.check()


def test_it_goes_on_where_it_was():
    guard, other = RewardGuard(limit=3), RewardGuard(limit=3)
    for _ in range(2):
        guard.see(rollout(0.0))
    other.restore(guard.state())
    other.see(rollout(0.0))
    with pytest.raises(ConstantReward):
        other.check()
    other.restore(guard.state())
    other.see(rollout(1.0))
    other.check()


def test_where_a_teacher_teaches_rewards_may_be_constant():
    guard = RewardGuard(limit=2, rewards_teach=False)
    for _ in range(9):
        assert guard.see(rollout(0.0, 0.0)) is None
        guard.check()


def test_where_the_limits_cut_most_replies_off_they_are_told_beside_a_constant_reward():
    limits = r"of the last one 100% were cut off .*max_turn_tokens.*: is the reward a constant, or are the limits too low\?"
    for ends, words in ((CUT, limits), (Outcome.COMPLETED, "0: is the reward a constant")):
        guard = RewardGuard(limit=3)
        (told,) = filter(None, [guard.see(rollout(0.0, 0.0, None, ends=ends)) for _ in range(3)])
        assert re.search(words, told)
        with pytest.raises(ConstantReward, match="max_turn_tokens" if ends is CUT else "given the reward 0: there is nothing"):
            guard.check()


def test_rewards_that_tell_prompts_apart_and_no_replies_are_warned_of_once():
    guard = RewardGuard(limit=1)
    told = [guard.see([*rollout(1.0, 1.0), *rollout(2.0, 2.0, None), *rollout(None, None)]) for _ in range(9)]
    assert [i for i, warning in enumerate(told, start=1) if warning] == [WARN_AFTER]
    assert "does the reward read the reply?" in (told[WARN_AFTER - 1] or "")
    guard.check()


@pytest.mark.parametrize("groups", [((1.0, 1.0), (2.0, 1.0)), ((1.0,), (2.0,))], ids=["they differ in one group", "one reply to each"])
def test_where_replies_to_a_prompt_differ_or_are_alone_nothing_is_said(groups):
    guard = RewardGuard(limit=1)
    for _ in range(9):
        assert guard.see([group for rewards in groups for group in rollout(*rewards)]) is None


def test_a_start_that_goes_on_takes_its_replies_for_compared():
    guard, other = RewardGuard(limit=1), RewardGuard(limit=1)
    guard.see(rollout(0.0, 1.0))
    other.restore(guard.state())
    for _ in range(9):
        assert other.see([*rollout(1.0, 1.0), *rollout(2.0, 2.0)]) is None


def test_rewards_that_all_fall_to_one_lower_number_are_warned_of_each_time():
    guard = RewardGuard(limit=1)
    scores = [(0.0, 1.0)] + 5 * [(0.0, 0.0)] + [(1.0, 0.0)] + 4 * [(0.0, None)] + 9 * [(1.0, 1.0)]
    told = [guard.see(rollout(*rewards)) for rewards in scores]
    assert [i for i, warning in enumerate(told) if warning] == [3, 9]
    assert "the policy may have collapsed" in (told[3] or "") and "where the mean has been 0.5" in (told[3] or "")
    guard.check()
