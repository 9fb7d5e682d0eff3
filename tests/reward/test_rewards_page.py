"""docs/rewards.md: every built-in reward with its options and defaults, and examples that score as they say."""

import asyncio
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reward.loopback_server import answer, serving
from tests.reward.reward_samples import make_trajectory
from whet.evaluate.recorded import read_trajectories
from whet.reward import RewardConfig, build_reward
from whet.reward.base import place_token_rewards
from whet.reward.build import REWARDS
from whet.rollout.samples import samples_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
WITHOUT_EXAMPLE = {"environment", "overlong", "random", "roles"}
"""They look at tokens, at what an environment gave, or at nothing."""
ELSEWHERE = {"model", "reasoning_gym"}
"""Their examples need a model, or a package of others."""


def block(section: str, language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{len(found)} blocks of {language}"
    return found[0]


def test_every_reward_has_a_section():
    assert SECTIONS.keys() == REWARDS.keys()


@pytest.mark.parametrize("name", REWARDS)
def test_every_option_is_listed_with_its_default(name):
    heads = [line.partition(":")[0] for line in SECTIONS[name].split("\n") if line.startswith("- ")]
    listed = dict(pair for head in heads for pair in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", head))
    assert listed == {option: shown(field) for option, field in REWARDS[name].options.model_fields.items()}


def shown(field) -> str:
    """A default as the page writes it."""
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return str(default).lower()
    return {"None": "unset", "{}": "empty"}.get(str(default), f"`{default}`" if isinstance(default, str) else str(default))


@pytest.mark.parametrize("name", sorted(REWARDS.keys() - ELSEWHERE))
def test_the_examples_score_as_they_say(name, tmp_path):
    settings = tomllib.loads(block(SECTIONS[name], "toml"))
    if name in WITHOUT_EXAMPLE:
        build_reward(RewardConfig.model_validate(settings)).close()
        return
    rows = [json.loads(line) for line in block(SECTIONS[name], "jsonl").splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if name in ("remote", "rubric"):
        with serving(answer(json.loads(block(SECTIONS[name], "json")))) as (url, _):
            key = "url" if name == "remote" else "base_url"
            settings["options"][key] = settings["options"][key].replace("http://127.0.0.1:8000", url)
            check(settings, rows, tmp_path)
    else:
        check(settings, rows, tmp_path)


def check(settings, rows, folder):
    reward = build_reward(RewardConfig.model_validate({"timeout_s": 60.0, **settings}))

    async def score_all():
        return [(await reward(trajectory)).total for trajectory in read_trajectories(str(folder / "rows.jsonl"))]

    try:
        assert asyncio.run(score_all()) == pytest.approx([row["reward"] for row in rows], abs=1e-12)
    finally:
        reward.close()


def test_what_an_environment_gives_for_a_turn_becomes_the_reward_of_its_last_token(tmp_path):
    """The page's function, through a worker, down to the samples."""
    (tmp_path / "turn_rewards.py").write_text(block(PAGE.partition("\n## ")[0], "python"))
    played = make_trajectory("done")
    turns = tuple(replace(turn, reward=given) for turn, given in zip(played.turns, (0.5, None), strict=True))
    played = replace(played, turns=turns)
    reward = build_reward(RewardConfig(name=f"{tmp_path / 'turn_rewards.py'}:each_turn", timeout_s=60.0))
    try:
        scored, rewards = place_token_rewards(played, asyncio.run(reward(played)))
    finally:
        reward.close()
    (sample,) = samples_of(replace(scored, rewards=rewards))
    (plain,) = samples_of(replace(played, rewards=rewards))
    assert plain.token_rewards is None, "by itself it trains nothing"
    assert sample.token_rewards == (0.0, 0.0, 0.0, 0.5, 0.0, 0.0), "prompt 2, said 2, environment 1, said 1"


def test_the_first_settings_build():
    first, second = re.findall(r"^```toml\n(.*?)^```", PAGE.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    for text in (first, second):
        build_reward(RewardConfig.model_validate(tomllib.loads(text)["reward"])).close()
