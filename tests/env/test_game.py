"""Games: each role's view, turns and score are its own, and GRPO compares a role with the same role of its siblings."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from tests.fakes import FakeEngine
from tests.rollout.scripted import RENDERER, STOP, opens, run, says, turns
from whet.config import ConfigError
from whet.core.advantages import group_advantages
from whet.core.batch import batch_of
from whet.core.weights import sample_mean
from whet.env.build import EnvConfig, build_env_factory
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.reward.base import RewardError
from whet.reward.build import RewardConfig, build_reward
from whet.reward.roles import RolesReward
from whet.rollout.filters import zero_std
from whet.rollout.samples import samples_of_groups
from whet.types import Group, Message, Outcome, Rewards, SamplingParams, Task
from whet.types.json_codec import trajectory_from_json, trajectory_to_json

GAMES = """
class Debate:
    roles = ("proposer", "critic")

    def __init__(self, rounds=1):
        self.rounds = rounds

    async def play(self, task, players):
        proposer, critic = players["proposer"], players["critic"]
        proposer.hear("12", role="system")
        critic.hear("36", role="system")
        said = task.prompt[-1].content
        for _ in range(self.rounds):
            proposer.hear(said)
            offer = await proposer.speak()
            if offer is None:
                break
            critic.hear("The answer")
            critic.hear(offer)
            said = await critic.speak()
            if said is None:
                break
        won = float("36" in (offer or ""))
        return {"proposer": won, "critic": -won}

class Mute(Debate):
    async def play(self, task, players):
        return {"proposer": 0.0, "critic": 0.0}

class Unfair(Debate):
    async def play(self, task, players):
        await super().play(task, players)
        return {"proposer": float("nan"), "critic": 0.0}

class NoGame:
    roles = ()
"""


@pytest.fixture
def games(tmp_path):
    path = tmp_path / "my_games.py"
    path.write_text(GAMES)
    return path


def task(name="t"):
    return Task(name, (Message("user", "12*3?"),))


def played(games, name, *replies, limits=None, sibling=0, **options):
    given = {"name": "game", "options": {"game": f"{games}:{name}", **options}, "max_reply_chars": 100, "reply_cut": "head"}
    env = EnvConfig.model_validate(given)
    engine = FakeEngine(turns(*(says(reply) for reply in replies)))
    params = SamplingParams(999, stop_token_ids=(STOP,))
    made = TrajectoryRun(f"t/{sibling}", task(), engine, RENDERER, params, limits or Limits(9, 1000, 200))
    found = run(made.to_end(opens(build_env_factory(env)())))
    engine.check_idle()
    return found


def scored(trajectory):
    return replace(trajectory, rewards=asyncio.run(RolesReward()(trajectory)))


def texts(turn):
    return RENDERER.decode(turn.context)


def test_each_role_hears_its_own_and_its_turns_come_together(games):
    found = played(games, "Debate", "3", "12", "36", "is", options={"rounds": 2})
    assert found.outcome is Outcome.COMPLETED
    assert [(turn.role, turn.message.content, turn.restart) for turn in found.turns] == [
        ("proposer", "3", False), ("proposer", "36", False), ("critic", "12", True), ("critic", "is", False),
    ]  # fmt: skip
    assert [turn.reward for turn in found.turns] == [None, 1.0, None, -1.0]
    assert "system\n12" in texts(found.turns[0]) and "12*3?" in texts(found.turns[0]) and "36" not in texts(found.turns[0])
    assert "user\nThe answer\n3<" in texts(found.turns[2]) and "12*3?" not in texts(found.turns[2])
    assert "user\n12<" in texts(found.turns[1])


def test_a_role_that_does_not_train_is_no_part_of_the_trajectory(games):
    found = played(games, "Debate", "36", "12", untrained=["critic"])
    assert [(turn.role, turn.reward) for turn in found.turns] == [("proposer", 1.0)]


def test_what_is_heard_loses_the_part_that_is_chosen(games):
    found = played(games, "Debate", "12" * 200 + "36", "12")
    assert "characters left out" in texts(found.turns[1]) and texts(found.turns[1]).count("36") >= 2


def test_a_limit_makes_a_game_truncated_and_it_is_scored_all_the_same(games):
    found = played(games, "Debate", "36", limits=Limits(1, 1000, 200))
    assert found.outcome is Outcome.TRUNCATED and [turn.reward for turn in found.turns] == [1.0]


@pytest.mark.parametrize(
    ("name", "text"), [("Mute", "before a role that trains had said anything"), ("Unfair", "'proposer' the score nan")]
)
def test_a_game_that_breaks_its_promise_is_an_error_of_the_environment(games, name, text):
    found = played(games, name, "36", "12")
    assert found.outcome is Outcome.ENV_ERROR and text in found.error.message


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"game": "{}:NoGame"}, "a game has roles and an async method play"),
        ({"game": "{}:Debate", "untrained": ["judge"]}, "no role 'judge'"),
        ({"game": "{}:Debate", "untrained": ["critic", "proposer"]}, "none would train"),
        ({"game": "{}:Debate", "options": {"round": 1}}, "round"),
    ],
)
def test_a_game_that_cannot_be_made_says_why(games, options, text):
    given = {name: value.format(games) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=re.escape(text)):
        build_env_factory(EnvConfig.model_validate({"name": "game", "options": given}))()


def test_the_reward_roles_has_each_score_by_name_and_their_mean_as_total(games):
    rewards = asyncio.run(RolesReward()(played(games, "Debate", "36", "12")))
    assert rewards == Rewards(0.0, {"proposer": 1.0, "critic": -1.0}, by_role={"proposer": 1.0, "critic": -1.0})
    with pytest.raises(RewardError, match=r'env\.name = "game"'):
        asyncio.run(RolesReward()(played(games, "Mute", "36")))


def test_a_role_trains_on_its_own_score_compared_with_the_same_role_of_its_siblings(games):
    """A zero-sum game: every trajectory's total is 0, and no role is compared with its rival."""
    siblings = [scored(played(games, "Debate", reply, "12", sibling=k)) for k, reply in enumerate(["36", "3", "36 is 36", "36"])]
    assert {t.rewards.total for t in siblings} == {0.0}
    samples = samples_of_groups([Group(task(), tuple(siblings))])
    batch = batch_of(samples)
    found = {(s.trajectory, s.role): float(a) for s, a in zip(samples, group_advantages(batch), strict=True)}
    for role, sign in (("proposer", 1), ("critic", -1)):
        scores = [sign * won for won in (1.0, 0.0, 1.0, 1.0)]
        mean = sum(scores) / 4
        std = (sum((score - mean) ** 2 for score in scores) / 3) ** 0.5
        assert [found[f"t/{k}", role] for k in range(4)] == pytest.approx([(score - mean) / (std + 1e-6) for score in scores])
    weights = sample_mean(batch)
    sums = [float(part.sum()) for part in weights.split(batch.lengths.tolist())]
    assert sums == pytest.approx([1 / 8] * 8), "a role of a trajectory counts as one"


def test_a_group_is_dropped_for_want_of_variance_only_if_no_role_has_any(games):
    won, lost = (scored(played(games, "Debate", reply, "12", sibling=k)) for k, reply in enumerate(["36", "3"]))
    assert zero_std(Group(task(), (won, lost))) is None, "the totals are the same, the roles' scores are not"
    assert zero_std(Group(task(), (won, won))) is not None


def test_roles_and_their_scores_survive_json(games):
    found = scored(played(games, "Debate", "36", "12"))
    assert trajectory_from_json(trajectory_to_json(found)) == found


def test_a_weighted_sum_of_rewards_gives_each_role_its_own(games):
    reward = build_reward(
        RewardConfig.model_validate({"components": {"game": {"name": "roles", "weight": 2.0}, "noise": {"name": "roles", "weight": 0.5}}})
    )
    try:
        found = asyncio.run(reward(played(games, "Debate", "36", "12")))
    finally:
        reward.close()
    assert found.by_role == {"proposer": 2.5, "critic": -2.5} and found.total == 0.0
