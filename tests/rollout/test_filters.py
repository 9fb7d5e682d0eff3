"""Why finished groups are dropped: the rules that come with whet, and functions of a user's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.config import ConfigError, HookFailed
from whet.rollout.control import ControlConfig, FilterConfig
from whet.rollout.filters import build_selection
from whet.types import Finish, Group, Message, Outcome, Rewards, Task, Trajectory, Turn

TASK = Task("t", "q")


def group(*rewards, tokens=None):
    """Siblings with these rewards (None: it failed), of so many tokens each."""
    lengths = tokens or [3] * len(rewards)
    turns = [Turn((1,), (0,), (2,) * n, (-1.0,) * n, (0,) * n, Message("assistant", "x"), Finish.STOP) for n in lengths]
    return Group(TASK, tuple(
        Trajectory(f"t/{k}", TASK, (turn,), *((Outcome.REWARD_ERROR,) if reward is None else (Outcome.COMPLETED, Rewards(reward))))
        for k, (turn, reward) in enumerate(zip(turns, rewards, strict=True))
    ))  # fmt: skip


def verdict(name, found, **options):
    (keep,), order = build_selection(ControlConfig(filters=[FilterConfig(name=name, options=options)]))
    assert order is None
    return keep(found)




@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1, 1, 1, 1], "zero_std_1.0"),
        ([0.0, 1e-7, 0, 0], "zero_std_0.0"),
        ([0.34] * 4, "zero_std_0.3"),
        ([0.0, 1e-5, 0, 0], None),
        ([0, 1], None),
        ([1.0, None], "zero_std_1.0"),
        ([1.0, None, 0.0], None),
        ([None, None], "no_valid"),
    ],
)
def test_groups_that_teach_nothing_are_dropped(rewards, reason):
    """The first three are recorded cases of slime's check_reward_nonzero_std (which says 1 for 1.0); failed siblings are not compared."""
    assert verdict("zero_std", group(*rewards)) == reason


@given(st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=1, max_size=6))
def test_what_zero_std_keeps_has_a_spread_by_an_independent_formula(rewards):
    valid = [reward for reward in rewards if reward is not None]
    mean = sum(valid) / len(valid) if valid else 0.0
    spread = (sum((x - mean) ** 2 for x in valid) / (len(valid) - 1)) ** 0.5 if len(valid) > 1 else 0.0
    if not 0.9e-6 < spread < 1.1e-6:
        assert (verdict("zero_std", group(*rewards)) is None) == (spread > 1e-6)


@pytest.mark.parametrize(
    ("rewards", "right", "wrong"),
    [
        ([1.0, 1.0], "all_right", None),
        ([0.9, 0.0], None, "all_wrong"),
        ([1.0, 0.0], None, None),
        ([1.0, None], "all_right", None),
        ([0.0, None], None, "all_wrong"),
        ([None, None], "no_valid", "no_valid"),
    ],
)
def test_groups_in_which_everybody_is_right_or_wrong(rewards, right, wrong):
    assert verdict("all_right", group(*rewards)) == right
    assert verdict("all_wrong", group(*rewards)) == wrong


def test_what_is_right_is_a_setting():
    assert verdict("all_right", group(0.5, 0.7), pass_reward=0.5) == "all_right"
    assert verdict("all_wrong", group(0.4, 0.3), pass_reward=0.5) == "all_wrong"


def test_token_rewards_are_part_of_a_score():
    found = group(1.0, 1.0)
    first, second = found.trajectories
    rewarded = replace(first, turns=(replace(first.turns[0], token_rewards=(0.0, 0.5, 0.0)),))
    assert verdict("zero_std", replace(found, trajectories=(rewarded, second))) is None


@pytest.mark.parametrize(
    ("options", "tokens", "reason"),
    [
        ({"min_tokens": 3}, [3, 9], None),
        ({"min_tokens": 4}, [3, 9], "too_short"),
        ({"max_tokens": 9}, [3, 9], None),
        ({"max_tokens": 8}, [3, 9], "too_long"),
        ({"min_tokens": 5, "max_tokens": 5}, [3, 9], "too_short"),
    ],
)
def test_groups_with_lengths_out_of_range(options, tokens, reason):
    assert verdict("length", group(1.0, 0.0, tokens=tokens), **options) == reason


def test_a_failed_trajectory_has_no_length():
    assert verdict("length", group(1.0, None, tokens=[5, 1]), min_tokens=4, max_tokens=6) is None
    assert verdict("length", group(None, None, tokens=[5, 1]), min_tokens=4, max_tokens=6) is None


def test_a_filter_of_ones_own_and_an_order(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def hard(group, least):\n"
        "    return None if len(group.trajectories) >= least else 'small'\n"
        "def empty(group):\n    return ''\n"
        "def breaks(group):\n    return group.nothing\n"
        "def turned(groups):\n    return groups[::-1]\n"
    )
    mine = f"{tmp_path / 'mine.py'}:"
    assert verdict(f"{mine}hard", group(1.0, 0.0), least=3) == "small"
    assert verdict(f"{mine}hard", group(1.0, 0.0, 0.5), least=3) is None
    with pytest.raises(HookFailed, match=r"control\.filters = .*:empty' returned '' for task 't'; return why"):
        verdict(f"{mine}empty", group(1.0))
    with pytest.raises(HookFailed, match=r"breaks' raised AttributeError: .*mine\.py:6 in breaks"):
        verdict(f"{mine}breaks", group(1.0))
    filters, order = build_selection(ControlConfig(order=f"{mine}turned"))
    groups = [group(1.0), group(0.0)]
    assert filters == [] and order is not None and order(groups) == groups[::-1]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("zero_sdt", {}, "there is no filter 'zero_sdt'; choose zero_std, all_right, all_wrong, length, or name a function"),
        ("zero_std", {"least": 1}, r"control\.filters: zero_std: options\.least: unknown key"),
        ("length", {"min_token": 1}, r"control\.filters: length: options\.min_token: unknown key; did you mean .*min_tokens"),
        ("all_right", {"pass_reward": "much"}, r"control\.filters: all_right: options\.pass_reward = \"much\": expected a number"),
        ("nowhere:keep", {}, "nowhere"),
    ],
)
def test_what_there_is_not_is_refused_by_name(name, options, words):
    with pytest.raises((ValueError, ConfigError), match=words):
        verdict(name, group(1.0), **options)


def parted(*parts):
    """A group whose rewards have a part `acc` and an unequal penalty."""
    found = group(*[acc - 0.1 * k for k, acc in enumerate(parts)])
    rewards = [replace(t, rewards=Rewards(t.rewards.total, {"acc": acc})) for t, acc in zip(found.trajectories, parts, strict=True)]
    return replace(found, trajectories=tuple(rewards))


@pytest.mark.parametrize("name", ["zero_std", "all_right"])
def test_a_filter_may_look_at_a_part_of_the_reward(name):
    assert verdict(name, parted(1.0, 1.0, 1.0)) is None
    assert verdict(name, parted(1.0, 1.0, 1.0), component="acc") is not None
    assert verdict(name, parted(1.0, 0.0, 1.0), component="acc") is None
    assert verdict("all_wrong", parted(0.0, 0.0), component="acc") == "all_wrong"
    with pytest.raises(ConfigError, match=r"component is 'accuracy', but the reward of task 't' has acc"):
        verdict(name, parted(1.0, 0.0), component="accuracy")
