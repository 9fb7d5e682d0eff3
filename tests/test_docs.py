"""What README, docs/own_run.md and docs/commands.md show is run here; tests/e2e/test_front_page.py runs README's run."""

import asyncio
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from whet.config import load_config
from whet.data.formats.hermes import parse_hermes
from whet.env.base import Env
from whet.env.build import EnvConfig, build_env_factory
from whet.env.tool_sets import build_tools
from whet.reward import RewardConfig, build_reward
from whet.rollout.sampling import RolloutConfig
from whet.settings.rl import RunConfig
from whet.types import Finish, Message, Outcome, Rewards, Task, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
OWN_RUN = (ROOT / "docs/own_run.md").read_text()
COMMANDS = (ROOT / "docs/commands.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def block(page: str, language: str, word: str) -> str:
    found = [text for text in blocks(page, language) if word in text]
    assert len(found) == 1, f"the page has {len(found)} {language} blocks with {word!r}"
    return found[0]


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that modules are looked for in. Other pages have some of the same names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    forget_modules()
    yield tmp_path
    forget_modules()


def rewards_of(settings: dict, response: str) -> Rewards:
    """What a page's reward gives to a reply to a question whose answer is 42."""
    reward = build_reward(RewardConfig.model_validate({**settings, "timeout_s": 60.0}))
    turn = Turn((1,), (0,), (2,), (-0.5,), (0,), Message("assistant", response), Finish.STOP)
    trajectory = Trajectory("t/0", Task("t", "What is it?", "42"), (turn,), Outcome.COMPLETED)
    try:
        return asyncio.run(reward(trajectory))
    finally:
        reward.close()


def answer_of(env: Env, tool: str, **arguments: str) -> str:
    """What a tool says to a call that a model wrote."""
    call = f'<tool_call>{json.dumps({"name": tool, "arguments": arguments})}</tool_call>'
    return asyncio.run(env.step(parse_hermes(call))).messages[0].content


def test_the_front_pages_reward_scores(here):
    (here / "my_rewards.py").write_text(block(README, "python", "# my_rewards.py"))
    settings = tomllib.loads(block(README, "toml", "# my_run.toml"))["reward"]
    assert rewards_of(settings, "It is 42.").components == pytest.approx({"right": 1.0, "brief": 0.1})
    assert rewards_of(settings, "It is 420, or so it seems.").components == pytest.approx({"right": 0.0, "brief": 0.0})


def test_the_front_pages_tool_answers_and_explains(here):
    (here / "my_tools.py").write_text(block(README, "python", "# my_tools.py"))
    config = load_front_page(here)
    env = build_env_factory(config.env)()
    (schema,) = env.tools
    assert schema["function"]["parameters"]["properties"]["expression"]["description"] == "for example 12*7."
    assert [answer_of(env, "calculator", expression=text) for text in ("12*7", "3-5", "40+2")] == ["84", "-2", "42"]
    assert "two whole numbers" in answer_of(env, "calculator", expression="2**9")


def load_front_page(folder: Path) -> RunConfig:
    path = folder / "my_run.toml"
    path.write_text(block(README, "toml", "# my_run.toml"))
    return load_config(RunConfig, path)


def test_the_smallest_file_is_a_run(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(block(OWN_RUN, "toml", "num_rollouts = 100"))
    config = load_config(RunConfig, path)
    assert config.evaluate.sets["test"].rollout.temperature == 0.0


def test_the_reward_scores(here):
    (here / "my_rewards.py").write_text(block(OWN_RUN, "python", "def brevity"))
    settings = tomllib.loads(block(OWN_RUN, "toml", "my_rewards:brevity"))["reward"]
    rewards = rewards_of(settings, "It is 42")
    assert rewards.components["correct"] == 1.0
    assert rewards.components["brief"] == pytest.approx(0.1)
    assert rewards.total == pytest.approx(1.1)


def test_the_tool_answers_and_explains(here):
    (here / "my_tools.py").write_text(block(OWN_RUN, "python", "def capital"))
    settings = tomllib.loads(block(OWN_RUN, "toml", "my_tools:capital"))
    RolloutConfig.model_validate(settings["rollout"])
    env = build_env_factory(EnvConfig.model_validate(settings["env"]))()
    (tool,) = build_tools("my_tools:capital")
    schema = tool.schema["function"]
    assert schema["parameters"]["properties"]["country"]["description"] == "name of the country in English."
    assert answer_of(env, "capital", country="Japan") == "Tokyo"
    assert "unknown country" in answer_of(env, "capital", country="Atlantis")


def test_every_command_is_in_the_table():
    from typer.main import get_command

    from whet.cli import app

    assert set(re.findall(r"^\| `whet ([\w-]+)", COMMANDS, re.MULTILINE)) == set(get_command(app).commands)


def test_nothing_is_left_to_fill_in():
    for page in (README, OWN_RUN, COMMANDS):
        assert "<!--" not in page
