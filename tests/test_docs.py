"""What README shows is run here."""

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from whet.config import load_config
from whet.data.parsers import parse_hermes
from whet.env.build import EnvConfig, build_env_factory, build_tool
from whet.reward import RewardConfig, build_reward
from whet.rollout.sampling import RolloutConfig
from whet.settings import RunConfig
from whet.types import Finish, Message, Outcome, Task, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def block(language: str, word: str) -> str:
    found = [text for text in blocks(language) if word in text]
    assert len(found) == 1, f"README has {len(found)} {language} blocks with {word!r}"
    return found[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(block("python", "def brevity"))
    (tmp_path / "my_tools.py").write_text(block("python", "def capital"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_smallest_file_is_a_run(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(block("toml", "num_rollouts = 100"))
    config = load_config(RunConfig, path)
    assert config.evaluate.sets["test"].rollout.temperature == 0.0


def test_the_reward_scores(here):
    settings = tomllib.loads(block("toml", "my_rewards:brevity"))["reward"]
    reward = build_reward(RewardConfig.model_validate({**settings, "timeout_s": 60.0}))
    turn = Turn((1,), (0,), (2,), (-0.5,), (0,), Message("assistant", "It is 42"), Finish.STOP)
    trajectory = Trajectory("t/0", Task("t", "What is it?", "42"), (turn,), Outcome.COMPLETED)
    try:
        rewards = asyncio.run(reward(trajectory))
    finally:
        reward.close()
    assert rewards.components["correct"] == 1.0
    assert rewards.components["brief"] == pytest.approx(0.1)
    assert rewards.total == pytest.approx(1.1)


def test_the_tool_answers_and_explains(here):
    settings = tomllib.loads(block("toml", "my_tools:capital"))
    RolloutConfig.model_validate(settings["rollout"])
    env = build_env_factory(EnvConfig.model_validate(settings["env"]))()
    schema = build_tool("my_tools:capital").schema["function"]
    assert schema["parameters"]["properties"]["country"]["description"] == "name of the country in English."

    def ask(country: str) -> str:
        call = f'<tool_call>{{"name": "capital", "arguments": {{"country": "{country}"}}}}</tool_call>'
        return asyncio.run(env.step(parse_hermes(call))).messages[0].content

    assert ask("Japan") == "Tokyo"
    assert "unknown country" in ask("Atlantis")


def test_every_command_is_in_the_table():
    from typer.main import get_command

    from whet.cli import app

    assert set(re.findall(r"^\| `whet ([\w-]+)", README, re.MULTILINE)) == set(get_command(app).commands)


def test_nothing_is_left_to_fill_in():
    assert "<!--" not in README


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
